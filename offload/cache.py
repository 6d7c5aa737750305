"""The cache of experts: which are near, which come next, which must go.

The step loop is its only user: every method belongs to its thread, so nothing here locks; threads
that read only complete transfers, and `statistics` may be looked at from anywhere. What misses
takes the slot of what the policy values least. Where nobody is worth less than the newcomer, it
borrows one of a few slots, so that a batch that touches everything streams past the hot set
instead of washing it away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import BudgetError, OffloadError
from offload.fetches import Filling, Source
from offload.held import Held
from offload.pins import Loan, lend
from offload.policies import EvictionPolicy
from offload.slots import Sizes, SlotTable
from offload.statistics import CacheStatistics

# ---- What is done with a cache between steps: more or less memory, and its hot set brought back.

LEAST_SLOTS = 2
"""One to compute with while the other is filled."""


class Room(Protocol):
    """The memory behind the slots, in grains; see `offload.arena.Arena`."""

    @property
    def capacity(self) -> int: ...

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...


def affordable(sizes: Sizes, room: Room, slots: int) -> int:
    """The grains of so many slots, as far as there are any.

    Raises:
        BudgetError: fewer than `LEAST_SLOTS`.
    """
    grains = min(sizes.grains_for(slots), room.capacity)
    largest, each = max(sizes.kinds), max(sizes.nbytes)
    if grains < LEAST_SLOTS * largest:
        raise BudgetError(
            f"an expert cache needs room for {LEAST_SLOTS} experts, "
            f"{LEAST_SLOTS * each} bytes at {each} bytes each; "
            f"there is room for {max(0, grains // largest)}: give the device more memory "
            "(memory.device_gib) or serve fewer bits"
        )
    return grains


def resize(filling: Filling, room: Room, grains: int) -> None:
    """Give back memory or take more; the most valuable units stay.

    Raises:
        OffloadError: a read does not end; nothing has changed.
    """
    table = filling.table
    assert not filling.pins, "a cache is resized between steps"
    filling.settle_unpinned()
    if filling.busy:
        raise OffloadError("the cache cannot be resized while a read does not end")
    values, cut = filling.policy.values(), table.owner[grains - 1 : grains].tolist()
    leaving = sorted(table.behind(grains), key=lambda unit: -values[unit])
    old = [(unit, table.slot[unit], table.grains[unit]) for unit in leaving]
    for unit in leaving:
        table.drop(unit)
    table.resize(grains)
    filling.victims.expect(len(leaving))
    for unit, slot, kind in old:
        # Who lies across the border would be in the way of those who come from behind it.
        if unit not in cut and filling.make_room(unit, kind, values[unit]):
            room.move(slot, table.slot[unit])
            table.publish(unit)
        else:
            filling.lost(unit)
    room.resize(grains)


def hot_set(filling: Filling) -> list[tuple[int, int]]:
    """(layer, expert) of what is there, most valuable first."""
    filling.poll()
    units = np.flatnonzero(filling.table.present)
    order = np.argsort(-filling.policy.values()[units], kind="stable")
    return [divmod(int(unit), filling.table.width) for unit in units[order]]


def drop(filling: Filling, experts: Iterable[tuple[int, int]]) -> None:
    """Free the slots of these, which nobody will ask for here."""
    filling.settle_unpinned()
    table, pinned = filling.table, set(chain(*filling.pins.values()))
    for unit in (layer * table.width + expert for layer, expert in experts):
        if table.present[unit] and unit not in pinned:
            filling.lost(unit)
            table.drop(unit)


def warm(filling: Filling, experts: Iterable[tuple[int, int]]) -> int:
    """Fill free slots with these, and wait for them; what fails is left out.

    Returns:
        How many are there now.
    """
    table = filling.table
    for layer, expert in experts:
        unit = layer * table.width + expert
        free = table.slot[unit] < 0
        if free and (slot := table.take_free(table.sizes.grains[unit])) is not None:
            table.place(unit, slot)
            with suppress(OffloadError):
                filling.begin(unit, "restored")
    filling.finish()
    return int(table.present.sum())


# ----


class ExpertCache:
    """Slots filled from a source under a policy.

    Args:
        sizes: of the experts.
        slots: for how many of them, on average, there may be room now.
        room: the memory.
        source: where experts come from.
        policy: made for as many layers, and for the largest E as width.

    Attributes:
        prefixed: whether less than all may be read of any expert.

    Raises:
        BudgetError: fewer slots than `LEAST_SLOTS`.
    """

    def __init__(
        self,
        sizes: Sizes,
        slots: int,
        room: Room,
        source: Source,
        policy: EvictionPolicy,
    ) -> None:
        self.policy = policy
        self.statistics = CacheStatistics(len(sizes.experts))
        self.sizes, self.expert_bytes = sizes, sizes.mean_bytes
        self.prefixed = sizes.prefixes != sizes.grains
        self._room = room
        grains = affordable(sizes, room, slots)
        room.resize(grains)
        self._table = SlotTable(sizes, grains, room.capacity)
        self._filling = Filling(self._table, source, policy, self.statistics)

    @property
    def slots(self) -> int:
        """Experts that there is room for now, on average where they have different sizes."""
        return self.sizes.experts_in(len(self._table.owner))

    @property
    def present(self) -> NDArray[np.bool_]:
        """``(units,)``, live: who is there."""
        return self._table.present

    def bytes_of(self, layer: int) -> Sequence[int]:
        """Of each expert of a layer, as it is read."""
        start = layer * self._table.width
        return self.sizes.nbytes[start : start + self.sizes.experts[layer]]

    def slot_ids(self, layer: int) -> Tensor:
        """``(E + 1,)`` int64, live: slot of each expert that is there, else -1; the last is -1, so
        that the unused slots of a routing (id -1) translate to -1."""
        return self._table.slot_ids(layer)

    def resident(self, layer: int) -> Tensor:
        """``(E,)`` bool on the CPU: who of a layer is there."""
        self._filling.poll()
        start = layer * self._table.width
        return torch.tensor(self._table.present[start : start + self._table.experts[layer]])

    def poll(self) -> None:
        """Take note of what has come."""
        self._filling.poll()

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert is there, as of the last `poll` or `acquire`."""
        return bool(self._table.there[layer * self._table.width + expert])

    def missing(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those that are not there, as of the last `poll` or `acquire`."""
        start, there = layer * self._table.width, self._table.there
        return [expert for expert in experts if not there[start + expert]]

    def lacks(self, layer: int, expert: int) -> bool:
        """Whether an expert is neither there nor on its way."""
        return self._table.slot[layer * self._table.width + expert] < 0

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those that it lacks."""
        return [expert for expert in experts if self.lacks(layer, expert)]

    @property
    def lost(self) -> int:
        """How many have been evicted so far."""
        return self._filling.lost_count

    def lost_since(self, layer: int, expert: int) -> float:
        """How many have been evicted since this one was; inf where it never was."""
        return self.lost - self._filling.lost_at[layer * self._table.width + expert]

    def acquire(
        self,
        layer: int,
        experts: Sequence[int],
        elsewhere: Sequence[int] = (),
        light: Collection[int] = (),
    ) -> Held:
        """Pin experts of a layer, and begin to fetch those that are absent.

        Args:
            layer: MoE layer.
            experts: ascending and distinct.
            elsewhere: absent ones that the call needs and finds elsewhere: counted as misses, and
                not fetched.
            light: of the experts, those that may be there by a prefix; no more is fetched of them.

        Returns:
            The handle, whose `waves` wait for what is fetched. A context manager that unpins.

        Raises:
            OffloadError: a fetch cannot even begin. Nothing is pinned.
        """
        start, there, filling = layer * self._table.width, self._table.there, self._filling
        units = [start + expert for expert in experts]
        apart = [start + expert for expert in elsewhere]
        self.policy.touch(layer, sorted(units + apart) if apart else units)
        if filling.busy:
            filling.poll()
        prefixes = {start + expert for expert in light} if light else ()
        if self.prefixed:
            filling.drop_prefixes(unit for unit in units if unit not in prefixes)
        missing = [unit for unit in units if not there[unit]]
        filling.asked(layer, units, missing)
        self.statistics.layers[layer].misses += len(apart)
        return Held(filling, layer, experts, units, missing, prefixes)

    def found(self, layer: int, experts: Sequence[int]) -> None:
        """Experts of a layer, ascending and distinct, have been run where they were."""
        start = layer * self._table.width
        units = [start + expert for expert in experts]
        self.policy.touch(layer, units)
        self._filling.asked(layer, units, [])

    def lend(self, layer: int, expert: int, *, urgent: bool) -> Loan | None:
        """Pin an expert for a faster tier, that copies it; see `offload.pins.lend`."""
        return lend(self._filling, layer * self._table.width + expert, urgent=urgent)

    def prefetch(self, layer: int, expert: int, *, value: float = 1.0) -> bool:
        """Begin to fetch an expert that may be wanted.

        Args:
            layer, expert: which.
            value: probability that it is asked for when its layer comes next. It must be worth
                more to the policy than what it would push out.

        Returns:
            Whether a transfer began; False also where it is there or on its way already.
        """
        unit, table, filling = layer * self._table.width + expert, self._table, self._filling
        if table.slot[unit] >= 0:
            return False
        if not filling.make_room(unit, self.sizes.grains[unit], self.policy.bid(unit, value)):
            return False
        try:
            filling.begin(unit, "prefetch")
        except OffloadError:
            return False
        return True

    def cancel(self, layer: int, expert: int) -> bool:
        """Take back a transfer that nobody waits for, if it has not begun; whether it was."""
        return self._filling.cancel(layer * self._table.width + expert)

    def resize(self, slots: int) -> int:
        """Give back memory or take more, between steps; the most valuable units stay.

        Returns:
            Slots there are now: at most the room's capacity.

        Raises:
            BudgetError: fewer than `LEAST_SLOTS`.
            OffloadError: a read does not end; nothing has changed.
        """
        resize(self._filling, self._room, affordable(self.sizes, self._room, slots))
        return self.slots

    def hot_set(self) -> list[tuple[int, int]]:
        """(layer, expert) of what is there, most valuable first."""
        return hot_set(self._filling)

    def drop(self, experts: Iterable[tuple[int, int]]) -> None:
        """Make room where these (layer, expert) are, which will not be asked for; between steps."""
        drop(self._filling, experts)

    def warm(self, hot_set: Iterable[tuple[int, int]]) -> int:
        """Fill free slots with these, and wait for them; what fails is left out.

        Returns:
            How many are there now.
        """
        return warm(self._filling, hot_set)
