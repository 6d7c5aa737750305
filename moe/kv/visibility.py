"""Which keys and values a token behind the prompt attends to, where a policy leaves some out.

Prompts are read whole, with attention to all of their tokens. A lossy policy of a profile
(`memory.kv_policy`) is written ``NAME:TOKENS``, one by heads ``heads:TOKENS:COUNT``; a token behind
the prompt then attends to at most ``TOKENS`` tokens of each layer that sees all:

- ``window``: the first block and the last ones, as in StreamingLLM (2309.17453).
- ``select``: half of them are the first block and those whose keys promise each key head the
  highest scores, as in Quest (2406.10774); half are the last ones. Each step chooses anew, so
  nothing is lost for later tokens.
- ``heads``: as ``window``, but the ``COUNT`` key heads of the model that look up earlier text the
  most attend to all, as in RazorAttention (2407.15891). `moe calibrate` finds them
  (`moe.commands.calibrate.induction`).

Some models are made so themselves (`moe.network.own_cache.OwnCache.policy`), which loses nothing:

- ``answer``: all tokens of the prompt, and the last ``TOKENS`` of what is behind it, its own among
  them.

`KVPolicy.row` says what a token attends to, and `KVPolicy.given_up` what no later one will. Both
follow from the token's position and the length of the prompt only. So a token's bits depend neither
on how the prompt was cut, nor on drafts, nor on a preemption, and another rank knows what a
sequence gives up. Keys keep the positions at which they were turned, which is not StreamingLLM's
way: it counts positions within the window. What `select` leaves out stays, what others leave out is
freed. Legend: N key heads, Q query heads, D their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.kv import BLOCK


class SeenRow(NamedTuple):
    """What a token attends to in layers that see all tokens.

    Attributes:
        blocks: int32, ascending, the last is its own; None: all of its sequence.
        num_blocks: of them.
        most: each key head chooses so many of them, if there are more; 0: none chooses.
        newest: of these the last ones, which need not be chosen.
        gap: of the tokens in these blocks, counted one behind the other, it does not attend to
            those from the first number up to the second; where none chooses.
    """

    blocks: np.ndarray | None
    num_blocks: int
    most: int = 0
    newest: int = 0
    gap: tuple[int, int] = (0, 0)

    @property
    def chooses(self) -> bool:
        return 0 < self.most < self.num_blocks


HeadsOfLayers = tuple[tuple[int, tuple[int, ...]], ...]
"""Key heads of some layers."""


InductionScores = Mapping[int, tuple[float, ...]]
"""Of layers that see all tokens, the score of each key head: how much it looks up earlier text
(`moe.commands.calibrate.induction`)."""


class KVPolicy(NamedTuple):
    """A policy by its name, and the most tokens that it leaves.

    Attributes:
        num_whole: key heads of the model that attend to all; 0: the policy is the same for all.
        heads: of each layer that sees all, the key heads that the policy leaves ``tokens`` of.
        share: of a token's bytes in layers that see all, those that the policy never gives up.
    """

    name: str
    tokens: int
    num_whole: int = 0
    heads: HeadsOfLayers = ()
    share: float = 0.0

    @classmethod
    def of(cls, spec: str) -> KVPolicy:
        """From a profile's text, which has been checked there. Which `heads` follow from a model's
        calibration, and ``share`` from its shape."""
        name, tokens, num_whole = f"{spec}:0".split(":")[:3]
        return cls(name, int(tokens), int(num_whole))

    @property
    def by_heads(self) -> bool:
        """Some key heads attend to all."""
        return self.num_whole > 0

    @property
    def selects(self) -> bool:
        """Each step chooses by bounds of the keys."""
        return self.name == "select"

    @property
    def lossy(self) -> bool:
        """It leaves out what the model itself would attend to."""
        return self.name != "answer"

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}" + (f":{self.num_whole}" if self.by_heads else "")

    def held(self, length: int) -> int:
        """Most tokens that a sequence of this length holds whose prompt has been read, however much
        of it that is."""
        if self.selects or not self.lossy:
            return length
        return self._left(length, min(length, self.tokens + BLOCK))

    def read(self, length: int) -> int:
        """Tokens that a step behind a sequence of this length attends to under a lossy policy, in
        the mean of heads."""
        return self._left(length, min(length, self.tokens))

    def _left(self, length: int, tokens: int) -> int:
        """What is left of a sequence if so many tokens are where the policy gives some up."""
        return tokens + math.ceil(self.share * (length - tokens))

    def most_held(self, prompt: int, length: int) -> int:
        """Tokens that a sequence holds at most while it grows from its prompt to a length."""
        if self.selects:
            return length
        if not self.lossy:  # parts of blocks, and those that are not given up at once
            return min(length, prompt + self.tokens + 6 * BLOCK)
        return self._left(length, min(length, max(prompt, self.tokens) + 3 * BLOCK))

    def most_forked(self, prompt: int, length: int) -> int:
        """Of the first ``length`` tokens of a sequence, those that another may have in its prompt.
        Under a policy of the model these have to have seen all before them; a lossy one leaves that
        to who reuses answers."""
        return length if self.lossy else min(length, prompt + self.tokens)

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        """The blocks that no token in the block of this position, behind a prompt of so many
        tokens, attends to, nor any behind it; by heads: with the heads of which it leaves out
        some. So they change where a block begins."""
        if self.selects:
            return np.arange(0, dtype=np.int32)
        first, end = 1, position // BLOCK + 2 - self.tokens // BLOCK
        if not self.lossy:
            begin = position // BLOCK * BLOCK
            first, end = -(-prompt // BLOCK), max(begin + 1 - self.tokens, 0) // BLOCK
        return np.arange(first, max(first, end), dtype=np.int32)

    def row(self, prompt: int, position: int) -> SeenRow | None:
        """What a token behind a prompt of so many tokens attends to; None: all. By heads: with
        those that do not attend to all."""
        if self.lossy:
            return _row(self.name, self.tokens, position // BLOCK)
        begin = position + 1 - self.tokens
        if begin <= prompt:
            return None
        return SeenRow(None, position // BLOCK + 1, gap=(prompt, begin))


@lru_cache(maxsize=1024)
def _row(name: str, tokens: int, own: int) -> SeenRow:
    """Of the tokens of one block."""
    policy = KVPolicy(name, tokens)
    if policy.selects:
        most = policy.tokens // BLOCK
        return SeenRow(None, own + 1, most, most // 2)
    kept = np.delete(np.arange(own + 1, dtype=np.int32), policy.given_up(0, own * BLOCK))
    return SeenRow(kept, len(kept))


def heads_without(induction: InductionScores, count: int) -> HeadsOfLayers:
    """The key heads of each layer but the ``count`` ones that look up the most."""
    order = sorted(
        (
            (-score, layer, head)
            for layer, own in induction.items()
            for head, score in enumerate(own)
        ),
    )
    kept = {(layer, head) for _, layer, head in order[:count]}
    heads = (
        (layer, tuple(head for head in range(len(own)) if (layer, head) not in kept))
        for layer, own in sorted(induction.items())
    )
    return tuple((layer, own) for layer, own in heads if own)


def seen_keys(row: SeenRow, query_QD: Tensor, key_NLD: Tensor, *, turned: bool) -> Tensor:
    """``(N, K)`` int64: the places of the keys that a token attends to, by key head. The oracle of
    compiled steps, and what a step that is not compiled does.

    Args:
        key_NLD: of all tokens up to its own.
        turned: bounds are those of keys turned by a Hadamard matrix.
    """
    heads, length = key_NLD.shape[:2]
    blocks = (
        torch.arange(row.num_blocks) if row.blocks is None else torch.from_numpy(row.blocks).long()
    )
    blocks = blocks.expand(heads, -1)
    if row.chooses:
        query_NGD = query_QD.unflatten(0, (heads, -1))
        if turned:
            query_NGD, key_NLD = turn(query_NGD), turn(key_NLD)
        middle_count = row.num_blocks - 1 - row.newest
        first, middle, last = blocks.split([1, middle_count, row.newest], 1)
        whole = key_NLD[:, : length // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
        whole = torch.stack([whole[n, middle[n]] for n in range(heads)])
        most, least = whole.amax(2), whole.amin(2)
        bounds_NGB = query_NGD.clamp_min(0) @ most.mT + query_NGD.clamp_max(0) @ least.mT
        near = (bounds_NGB - bounds_NGB.amax(-1, keepdim=True)).amax(1)
        order = near.sort(dim=-1, descending=True, stable=True).indices[
            :, : row.most - 1 - row.newest
        ]
        blocks = torch.cat([first, middle.gather(1, order.sort(-1).values), last], 1)
    places = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    places, (begin, end) = places[:, : places.shape[1] - (-length) % BLOCK], row.gap
    return torch.cat([places[:, :begin], places[:, end:]], 1).to(key_NLD.device)


def turn(rows: Tensor) -> Tensor:
    """Rows turned by the Hadamard matrix of `kernels/cpu/kv.h`."""
    size = rows.shape[-1]
    part = size & -size
    x, half = rows.unflatten(-1, (-1, part)), 1
    while half < part:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return (x / part**0.5).flatten(-2)
