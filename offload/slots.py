"""Who lives where: which expert is in which slot, and whether it is there.

A *unit* is an expert of a layer, numbered ``layer * width + expert`` with the widest layer's E as
width. Memory is a row of *grains*. Slots of one size lie side by side over all of it; where experts
have different sizes, or may be there by a prefix of their bits, slots of each size do, over the
same grains, and a slot is free while nobody has one of its grains. Slots are numbered size by size.
Legend: L MoE layers, E experts of a layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotSizes:
    """What the experts of a model take in a cache.

    Attributes:
        experts: E of each layer.
        kinds: how many grains an expert may take, in the order in which slots are numbered, and the
            bytes that are read into so many.
        grains: of each unit, 0 for those that are no expert.
        prefixes: of each unit, if no more than its prefix is read; as `grains` where that is all.
    """

    experts: Sequence[int]
    kinds: Mapping[int, int]
    grains: Sequence[int]
    prefixes: Sequence[int]

    @classmethod
    def equal(cls, experts: Sequence[int], nbytes: int) -> SlotSizes:
        """Each expert takes one grain."""
        there = [int(expert < count) for count in experts for expert in range(max(experts))]
        return cls(experts, {1: nbytes}, there, there)

    @cached_property
    def nbytes(self) -> Sequence[int]:
        """Of each unit, as it is read whole."""
        return [self.kinds.get(grains, 0) for grains in self.grains]

    @property
    def mean_bytes(self) -> int:
        """Of an expert."""
        return sum(self.nbytes) // sum(self.experts)

    @cached_property
    def all_grains(self) -> int:
        """That take all experts, the largest first: behind those of each size some may be lost."""
        return sum(self.grains) + sum(kind - 1 for kind in self.kinds)

    def grains_for(self, experts: int) -> int:
        """That so many experts take on average, rounded up."""
        return -(-experts * self.all_grains // sum(self.experts))

    def experts_in(self, grains: int) -> int:
        """The inverse of `grains_for`."""
        return grains * sum(self.experts) // self.all_grains

    def first_slots(self, capacity: int) -> dict[int, int]:
        """Of each kind the number of its first slot, where there are so many grains."""
        starts = np.cumsum([0, *(capacity // kind for kind in self.kinds)]).tolist()
        return dict(zip(self.kinds, starts, strict=False))


class SlotTable:
    """Which unit lives in which slot, and whether it is there.

    Args:
        sizes: of the units.
        grains: that may be used now.
        capacity: the most there can be; slots are numbered for it.

    Attributes:
        width: units of a layer.
        mixed: whether they have different sizes.
        grains: that each unit has, 0 without a slot.
        present: ``(units,)`` bool array, units that are there and may be computed with.
        there: the same one by one, which takes a fraction of the time.
        slot: of each unit, -1 without one; a unit has its slot before its bytes have come.
        owner: ``(grains,)`` int64 array, the unit that has each grain, -1 where it is free.
    """

    def __init__(self, sizes: SlotSizes, grains: int, capacity: int) -> None:
        self.sizes, self.experts = sizes, list(sizes.experts)
        self.width = max(self.experts)
        units = len(self.experts) * self.width
        self.present = np.zeros(units, dtype=bool)
        self.there = memoryview(self.present.data)
        self.slot, self.grains = [-1] * units, [0] * units
        self.owner = np.zeros(0, dtype=np.int64)
        self._first, self.mixed = sizes.first_slots(capacity), len(sizes.kinds) > 1
        self._kinds, self._firsts = list(self._first), list(self._first.values())
        self._free: dict[int, dict[int, None]] = {}  # of each kind, the last one to be taken first
        self._ids = torch.full((len(self.experts), self.width + 1), -1, dtype=torch.int64)
        self._array = self._ids.numpy().reshape(-1)
        self._views = [row[: count + 1] for row, count in zip(self._ids, self.experts, strict=True)]
        self.resize(grains)

    def slot_ids(self, layer: int) -> Tensor:
        """``(E + 1,)`` int64, live: slot of each expert that is there, else -1; the last is -1, so
        that the unused slots of a routing (id -1) translate to -1."""
        return self._views[layer]

    def take_free(self, kind: int) -> int | None:
        """A free slot of so many grains, which must be given away; None where there is none."""
        free = self._free[kind]
        return free.popitem()[0] if free else None

    def is_whole(self, unit: int) -> bool:
        """Whether a unit has room for all of it."""
        return self.grains[unit] == self.sizes.grains[unit]

    def owners(self, kind: int, slot: int) -> list[int]:
        """Of a slot of a kind, grain by grain."""
        owners: list[int] = self.owner[self._span(kind, slot)].tolist()
        return owners

    def first_slot(self, kind: int) -> int:
        """The number of the first slot of so many grains."""
        return self._first[kind]

    def place(self, unit: int, slot: int) -> None:
        """Give a free slot to a unit without one."""
        kind = self._kinds[bisect_right(self._firsts, slot) - 1]
        assert self.slot[unit] == -1
        self.slot[unit], self.grains[unit] = slot, kind
        self._free[kind].pop(slot, None)
        if not self.mixed:
            self.owner[slot] = unit
            return
        self.owner[self._span(kind, slot)] = unit
        for other, number in self._across(kind, slot):
            self._free[other].pop(number, None)

    def publish(self, unit: int) -> None:
        """It is there."""
        self.present[unit] = True
        self._array[unit + unit // self.width] = self.slot[unit]

    def drop(self, unit: int) -> None:
        """The unit loses its slot, which is free then."""
        kind, slot = self.grains[unit], self.slot[unit]
        self.slot[unit], self.grains[unit] = -1, 0
        self.present[unit] = False
        self._array[unit + unit // self.width] = -1
        self._free[kind][slot] = None
        if not self.mixed:
            self.owner[slot] = -1
            return
        self.owner[self._span(kind, slot)] = -1
        for other, number in self._across(kind, slot):
            if max(self.owners(other, number)) < 0:
                self._free[other][number] = None

    def behind(self, grains: int) -> list[int]:
        """The units that have grains behind the first so many."""
        return sorted(set(self.owner[grains:].tolist()) - {-1})

    def resize(self, grains: int) -> None:
        """Add free grains, or take away those behind ``grains``, which must be free."""
        assert not self.behind(grains)
        added = np.full(max(0, grains - len(self.owner)), -1)
        self.owner = np.concatenate([self.owner[:grains], added])
        for kind, first in self._first.items():
            taken = (self.owner[: grains // kind * kind].reshape(-1, kind) >= 0).any(1)
            free = np.flatnonzero(~taken)[::-1] + first
            self._free[kind] = dict.fromkeys(free.tolist())

    def _span(self, kind: int, slot: int) -> slice:
        """The grains of a slot."""
        start = (slot - self._first[kind]) * kind
        return slice(start, start + kind)

    def _across(self, kind: int, slot: int) -> Iterator[tuple[int, int]]:
        """Kinds and numbers of the other slots that have some of a slot's grains."""
        span = self._span(kind, slot)
        for other, first in self._first.items():
            end = min((span.stop - 1) // other + 1, len(self.owner) // other)
            if other != kind:
                yield from ((other, first + at) for at in range(span.start // other, end))
