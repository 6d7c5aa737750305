"""A source of experts whose bytes arrive when the test says, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.pins import PinnedExperts
from offload.policies import POLICIES
from offload.slots import SlotSizes

EXPERT_BYTES = 12
EXPERTS = [6, 4, 8]


def content(layer: int, expert: int, grains: int = 1) -> Tensor:
    """The bytes of an expert, unlike any other's."""
    seed, nbytes = layer * 1000 + expert * 7, grains * EXPERT_BYTES
    return torch.tensor([(seed + 31 * index) % 251 + 1 for index in range(nbytes)]).byte()


def mixed(experts: Sequence[int]) -> SlotSizes:
    """Experts of 2, 3, 4 and 8 grains in turn."""
    kinds, width = [4, 2, 8, 3], max(experts)
    grains = [
        kinds[(layer + expert) % 4] if expert < count else 0
        for layer, count in enumerate(experts)
        for expert in range(width)
    ]
    return SlotSizes(experts, {kind: EXPERT_BYTES * kind for kind in kinds}, grains, grains)


def with_prefixes(sizes: SlotSizes) -> SlotSizes:
    """Of the experts of 8 grains, half may be read, and of those of 3 two."""
    half = {8: 4, 3: 2}
    return replace(sizes, prefixes=[half.get(grains, grains) for grains in sizes.grains])


class FakeRoom:
    """Slots as rows of bytes, those of each kind over the same memory."""

    def __init__(self, capacity: int, kinds: Iterable[int] = (1,)) -> None:
        self.capacity = self.grains = capacity
        self.memory = torch.zeros(capacity, EXPERT_BYTES, dtype=torch.uint8)
        self.rows = [
            self.memory[start * kind : (start + 1) * kind].view(-1)
            for kind in kinds
            for start in range(capacity // kind)
        ]

    def in_use(self, slot: int) -> bool:
        """Whether no byte of it was given back."""
        end = self.rows[slot].storage_offset() + len(self.rows[slot])
        return end <= self.grains * EXPERT_BYTES

    def move(self, source: int, target: int) -> None:
        assert self.in_use(source)
        assert self.in_use(target)
        self.rows[target].copy_(self.rows[source])

    def resize(self, grains: int) -> None:
        assert 0 <= grains <= self.capacity
        self.memory[grains:] = 0
        self.grains = grains


@dataclass
class FakeTransfer:
    source: FakeSource
    layer: int
    expert: int
    slot: int
    urgent: bool
    fails: bool = False
    begun: bool = False
    done: bool = False
    failed: Exception | None = None

    @property
    def row(self) -> Tensor:
        return self.source.room.rows[self.slot]

    def finish(self) -> None:
        if self.done:
            return
        self.done = True
        self.source.under_way.remove(self)
        if self.fails:
            self.row.zero_()
            self.failed = OffloadError(f"expert {self.expert} of layer {self.layer}: disk error")
            return
        self.row.copy_(content(self.layer, self.expert, len(self.row) // EXPERT_BYTES))

    def wait(self) -> float:
        self.finish()
        if self.failed is not None:
            raise self.failed
        return 0.001

    def cancel(self) -> bool:
        if self.begun or self.done:
            return False
        self.done = True
        self.source.under_way.remove(self)
        return True

    def hasten(self) -> None:
        self.urgent = True


@dataclass
class FakeSource:
    """Fills slots of a room.

    Attributes:
        fails: (layer, expert) whose transfers fail.
        refuses: (layer, expert) whose transfers do not even begin.
        at_once: transfers are done when they are asked for.
    """

    room: FakeRoom
    fails: set[tuple[int, int]] = field(default_factory=set)
    refuses: set[tuple[int, int]] = field(default_factory=set)
    at_once: bool = False
    under_way: list[FakeTransfer] = field(default_factory=list)
    asked: list[FakeTransfer] = field(default_factory=list)

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> FakeTransfer:
        assert self.room.in_use(slot)
        if (layer, expert) in self.refuses:
            raise OffloadError(f"expert {expert} of layer {layer}: file gone")
        assert all(other.slot != slot for other in self.under_way), "two transfers into one slot"
        fails = (layer, expert) in self.fails
        transfer = FakeTransfer(self, layer, expert, slot, urgent, fails)
        self.under_way.append(transfer)
        self.asked.append(transfer)
        if self.at_once:
            transfer.finish()
        return transfer


def make(
    slots: int,
    policy: str = "lru",
    experts: Sequence[int] = EXPERTS,
    capacity: int = 0,
    sizes: SlotSizes | None = None,
) -> tuple[ExpertCache, FakeSource]:
    sizes = sizes or SlotSizes.equal(experts, EXPERT_BYTES)
    room = FakeRoom(sizes.grains_for(capacity or slots), sizes.kinds)
    source = FakeSource(room)
    chosen = POLICIES[policy](len(experts), max(experts))
    return ExpertCache(sizes, slots, room, source, chosen), source


def check_bytes(source: FakeSource, slot: int, layer: int, expert: int) -> None:
    row = source.room.rows[slot]
    assert torch.equal(row, content(layer, expert, len(row) // EXPERT_BYTES)), expert


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def walk(held: PinnedExperts, source: FakeSource, layer: int) -> list[list[int]]:
    """The experts of each round; checks every byte."""
    rounds = []
    with held:
        for ready in held.rounds:
            for expert in ready.experts:
                check_bytes(source, int(ready.slot_ids[expert]), layer, expert)
            assert ready.slot_ids[-1].item() == -1
            rounds.append(list(ready.experts))
    return rounds
