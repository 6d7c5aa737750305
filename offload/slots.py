"""Which expert is in which slot, and whether its bytes are there.

A *unit* is an expert of a layer, numbered ``layer * width + expert`` with the widest layer's E as
width. Memory is a row of *grains*; slots of one *kind* (equally many grains each) lie side by side
over all of it. If experts have different sizes, or may be there by a prefix of their bits, the
slots of each kind lie over the same grains, and a slot is free while none of its grains is in use.
Slots are numbered kind by kind. Legend: E experts of a layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of a model's experts in a cache.

    Attributes:
        experts: E of each layer.
        kinds: numbers of grains that an expert may take, in the order in which slots are numbered,
            and the bytes that are read into this many.
        grains: grains of each unit; 0 if it is no expert.
        prefixes: grains of each unit's prefix; as `grains` if it has none.
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
        """Bytes of each unit, read whole."""
        return [self.kinds.get(grains, 0) for grains in self.grains]

    @property
    def mean_bytes(self) -> int:
        """Mean over the experts."""
        return sum(self.nbytes) // sum(self.experts)

    @cached_property
    def all_grains(self) -> int:
        """Grains that hold all experts, largest first; between two sizes, some may be wasted."""
        return sum(self.grains) + sum(kind - 1 for kind in self.kinds)

    def grains_for(self, experts: int) -> int:
        """Grains that this many experts take on average, rounded up."""
        return -(-experts * self.all_grains // sum(self.experts))

    def experts_in(self, grains: int) -> int:
        """The inverse of `grains_for`."""
        return grains * sum(self.experts) // self.all_grains


class SlotTable:
    """Which unit is in which slot, and whether its bytes are there.

    Args:
        sizes: of the units.
        grains: that may be used now.
        capacity: the most grains there can be; slots are numbered for it.

    Attributes:
        width: units of a layer.
        first_slot: number of the first slot of each kind.
        mixed: whether there are slots of several kinds.
        grains: grains of each unit's slot, 0 without one.
        present: ``(units,)`` bool array, the units whose bytes are there.
        there: the same for looking at one unit, which takes a fraction of the time.
        slot: slot of each unit, -1 without one; a unit has its slot before its bytes.
        changes: how often the experts that are there have changed, of each layer.
        owner: ``(grains,)`` int64 array, the unit that has each grain, -1 if it is free.
    """

    def __init__(self, sizes: SlotSizes, grains: int, capacity: int) -> None:
        self.sizes, self.experts = sizes, list(sizes.experts)
        self.width = max(self.experts)
        units = len(self.experts) * self.width
        self.present = np.zeros(units, dtype=bool)
        self.there = memoryview(self.present.data)
        self.slot, self.grains = [-1] * units, [0] * units
        self.changes = [0] * len(self.experts)
        self.owner = np.zeros(0, dtype=np.int64)
        self.mixed, self._kinds = len(sizes.kinds) > 1, list(sizes.kinds)
        self._firsts = list(accumulate((capacity // kind for kind in sizes.kinds), initial=0))
        self.first_slot = dict(zip(self._kinds, self._firsts, strict=False))
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
        """A free slot of this many grains, which the caller must `place`; None if there is none."""
        free = self._free[kind]
        return free.popitem()[0] if free else None

    def room_beside(self, units: Sequence[int], slots: int) -> int:
        """Return how many of these units, from the first on, may stay where they are if this many
        slots of each kind shall have no grain of theirs."""
        taken = {kind: set[int]() for kind in self._kinds}
        for count, unit in enumerate(units):
            span = self._span(self.grains[unit], self.slot[unit])
            for kind, numbers in taken.items():
                numbers.update(range(span.start // kind, (span.stop - 1) // kind + 1))
                if len(self.owner) // kind - len(numbers) < slots:
                    return count
        return len(units)

    def is_whole(self, unit: int) -> bool:
        """Return whether a unit has room for all of it."""
        return self.grains[unit] == self.sizes.grains[unit]

    def owners(self, kind: int, slot: int) -> list[int]:
        """The unit in each grain of a slot, -1 if it is free."""
        owners: list[int] = self.owner[self._span(kind, slot)].tolist()
        return owners

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
        """The unit's bytes are there: show its slot to kernels."""
        self.present[unit] = True
        self.changes[unit // self.width] += 1
        self._array[unit + unit // self.width] = self.slot[unit]

    def drop(self, unit: int) -> None:
        """Free the unit's slot."""
        kind, slot = self.grains[unit], self.slot[unit]
        self.slot[unit], self.grains[unit] = -1, 0
        self.present[unit] = False
        self.changes[unit // self.width] += 1
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
        """The units with grains behind the first ``grains``."""
        return sorted(set(self.owner[grains:].tolist()) - {-1})

    def resize(self, grains: int) -> None:
        """Add free grains, or take away those behind ``grains``, which must be free."""
        assert not self.behind(grains)
        added = np.full(max(0, grains - len(self.owner)), -1)
        self.owner = np.concatenate([self.owner[:grains], added])
        for kind, first in self.first_slot.items():
            taken = (self.owner[: grains // kind * kind].reshape(-1, kind) >= 0).any(1)
            free = np.flatnonzero(~taken)[::-1] + first
            self._free[kind] = dict.fromkeys(free.tolist())

    def _span(self, kind: int, slot: int) -> slice:
        """The grains of a slot."""
        start = (slot - self.first_slot[kind]) * kind
        return slice(start, start + kind)

    def _across(self, kind: int, slot: int) -> Iterator[tuple[int, int]]:
        """Kinds and numbers of the other slots that have some of a slot's grains."""
        span = self._span(kind, slot)
        for other, first in self.first_slot.items():
            end = min((span.stop - 1) // other + 1, len(self.owner) // other)
            if other != kind:
                yield from ((other, first + at) for at in range(span.start // other, end))
