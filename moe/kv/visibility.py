"""Which keys and values a token behind the prompt attends to, where something leaves some out.

Prompts are read whole, with attention to all of their tokens. A `RowVisibility` then says of each
token behind the prompt what it sees in layers that see all (`RowVisibility.row`), and what no later
token will, so that its memory is freed (`RowVisibility.given_up`). Both follow from the token's
position and the length of the prompt only. So a token's bits depend neither on how the prompt was
cut, nor on drafts, nor on a preemption, and another rank knows what a sequence gives up. Keys keep
the positions at which they were turned.

Lossy ones are methods: ``memory.kv_policy: NAME:TOKENS`` asks `VISIBILITIES` for NAME. Some models
are made so themselves (`moe.network.answer_window`), which loses nothing.
Legend: N key heads, Q query heads, D their size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.kv import BLOCK
from moe.errors import ProfileError
from moe.hooks import Registry

if TYPE_CHECKING:
    from moe.kv.layout import KVFormat, Shape


class SeenRow(NamedTuple):
    """The blocks that a token attends to in layers that see all tokens.

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
HeadScores = Mapping[int, tuple[float, ...]]
"""The score of each key head, of layers that see all tokens, as a method gives it. `moe calibrate`
keeps scores beside the model."""
NONE = np.arange(0, dtype=np.int32)
"""No blocks."""


@dataclass(frozen=True)
class RowVisibility(ABC):
    """A rule for the tokens behind a prompt. It gives up nothing unless a subclass says so.

    Attributes:
        tokens: that a token attends to, at most; a multiple of 64 unless the model is made so.
        heads: of each layer that sees all, the key heads that the rule holds for; empty: for all.
        share: of a token's bytes in layers that see all, those that it never gives up.
        name: in `memory.kv_policy`.
        lossy: it leaves out what the model itself would attend to.
        bounds: it chooses by bounds of the keys, which blocks have to keep (`KVFormat.bounds`).
        by_heads: it holds for some heads only, which `for_layers` finds by `scored`.
    """

    tokens: int
    heads: HeadsOfLayers = ()
    share: float = 0.0
    name: ClassVar[str]
    lossy: ClassVar[bool] = True
    bounds: ClassVar[bool] = False
    by_heads: ClassVar[bool] = False

    @classmethod
    def parse(cls, tokens: int, more: Sequence[int]) -> RowVisibility:
        """From a profile's ``NAME:TOKENS``. Raises `ProfileError` if ``more`` numbers follow."""
        if more:
            raise ProfileError(
                f"memory.kv_policy: {cls.name} takes TOKENS alone, as in {cls.name}:{tokens}, and "
                f"got {':'.join(map(str, (tokens, *more)))}"
            )
        return cls(tokens)

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}"

    def of_tokens(self, tokens: int) -> RowVisibility:
        """The same rule with another number of tokens."""
        return replace(self, tokens=tokens)

    def for_layers(self, shapes: Mapping[int, Shape], form: KVFormat) -> RowVisibility:
        """The rule of a model with these layers of attention; see `by_heads`."""
        return self

    def scored(self, scores: HeadScores) -> RowVisibility:
        """The rule, knowing the key heads of the model; see `by_heads`."""
        return self

    @abstractmethod
    def row(self, prompt: int, position: int) -> SeenRow | None:
        """Return what a token after a prompt of so many tokens attends to; None: all. By heads:
        with those that it holds for."""

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        """The blocks that no token in the block of this position, behind a prompt of so many
        tokens, attends to, nor any behind it; by heads: with those that it holds for. So they
        change where a block begins."""
        return NONE

    def read(self, length: int) -> int:
        """Tokens that a step behind a sequence of this length attends to under a lossy rule, in the
        mean of heads."""
        return min(length, self.tokens)

    def held(self, length: int) -> int:
        """Most tokens that a sequence of this length holds whose prompt has been read, however much
        of it that is."""
        return length

    def most_held(self, prompt: int, length: int) -> int:
        """Tokens that a sequence holds at most while it grows from its prompt to a length."""
        return length

    def most_forked(self, prompt: int, length: int) -> int:
        """Return how many of the first ``length`` tokens of a sequence another may have in its
        prompt. Where the model is made so, these have to have seen all before them; a lossy rule
        leaves that to who reuses answers."""
        return length


VISIBILITIES = Registry[Callable[[int, Sequence[int]], RowVisibility]]("memory.kv_policy")
"""Rules that methods bring, each made of the numbers behind its name (`RowVisibility.parse`)."""


def visibility(spec: str | None) -> RowVisibility | None:
    """The rule that `memory.kv_policy` names.

    Args:
        spec: as the profile has it, which has checked the name and TOKENS.

    Raises:
        ProfileError: the rule takes other numbers.
    """
    if spec is None:
        return None
    name, tokens, *more = spec.split(":")
    parse = VISIBILITIES.find(name)
    assert parse is not None, spec
    return parse(int(tokens), [int(number) for number in more])


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
