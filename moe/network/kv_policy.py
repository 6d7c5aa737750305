"""Which keys and values a token behind the prompt attends to, where a policy leaves some out.

Prompts are read whole, with attention to all of their tokens. A lossy policy of a profile
(`memory.kv_policy`) is written ``NAME:TOKENS``; a token behind the prompt then attends to at most
``TOKENS`` tokens of each layer that sees all:

- ``window``: the first block and the last ones, as in StreamingLLM (2309.17453).
- ``select``: half of them are the first block and those whose keys promise each key head the
  highest scores, as in Quest (2406.10774); half are the last ones. Each step chooses anew, so
  nothing is lost for later tokens.

Some models are made so themselves (`moe.network.own_cache.OwnCache.policy`), which loses nothing:

- ``answer``: all tokens of the prompt, and the last ``TOKENS`` of what is behind it, its own among
  them.

`KVPolicy.row` says what a token attends to, and `KVPolicy.given_up` what no later one will. Both
follow from the token's position and the length of the prompt only. So a token's bits depend neither
on how the prompt was cut, nor on drafts, nor on a preemption, and another rank knows what a
sequence gives up. Keys keep the positions at which they were turned, which is not StreamingLLM's
way: it counts positions within the window. What `window` and `answer` give up is freed. Legend: N
key heads, Q query heads, D their size.
"""

from __future__ import annotations

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


class KVPolicy(NamedTuple):
    """A policy by its name, and the most tokens that it leaves."""

    name: str
    tokens: int

    @classmethod
    def of(cls, spec: str) -> KVPolicy:
        """From a profile's ``NAME:TOKENS``, which has been checked there."""
        name, tokens = spec.split(":")
        return cls(name, int(tokens))

    @property
    def selects(self) -> bool:
        """Each step chooses by bounds of the keys."""
        return self.name == "select"

    @property
    def lossy(self) -> bool:
        """It leaves out what the model itself would attend to."""
        return self.name != "answer"

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}"

    def held(self, length: int) -> int:
        """Most tokens that a sequence of this length holds whose prompt has been read, however much
        of it that is."""
        return min(length, self.tokens + BLOCK) if self.name == "window" else length

    def most_held(self, prompt: int, length: int) -> int:
        """Tokens that a sequence holds at most while it grows from its prompt to a length."""
        if self.selects:
            return length
        most = max(prompt, self.tokens) + 3 * BLOCK
        if not self.lossy:  # parts of blocks, and those that are not given up at once
            most = prompt + self.tokens + 6 * BLOCK
        return min(length, most)

    def most_forked(self, prompt: int, length: int) -> int:
        """Of the first ``length`` tokens of a sequence, those that another may have in its prompt.
        Under a policy of the model these have to have seen all before them; a lossy one leaves that
        to who reuses answers."""
        return length if self.lossy else min(length, prompt + self.tokens)

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        """The blocks that no token in the block of this position, behind a prompt of so many
        tokens, attends to, nor any behind it. So they change where a block begins."""
        if self.selects:
            return np.arange(0, dtype=np.int32)
        first, end = 1, position // BLOCK + 2 - self.tokens // BLOCK
        if not self.lossy:
            begin = position // BLOCK * BLOCK
            first, end = -(-prompt // BLOCK), max(begin + 1 - self.tokens, 0) // BLOCK
        return np.arange(first, max(first, end), dtype=np.int32)

    def row(self, prompt: int, position: int) -> SeenRow | None:
        """What a token behind a prompt of so many tokens attends to; None: all."""
        if self.lossy:
            return _row(self, position // BLOCK)
        begin = position + 1 - self.tokens
        if begin <= prompt:
            return None
        return SeenRow(None, position // BLOCK + 1, gap=(prompt, begin))


@lru_cache(maxsize=1024)
def _row(policy: KVPolicy, own: int) -> SeenRow:
    """Of the tokens of one block."""
    if policy.selects:
        most = policy.tokens // BLOCK
        return SeenRow(None, own + 1, most, most // 2)
    kept = np.delete(np.arange(own + 1, dtype=np.int32), policy.given_up(0, own * BLOCK))
    return SeenRow(kept, len(kept))


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
