"""A cache of experts: slots in one memory, filled from a source under an eviction policy.

A layer calls `ExpertCache.acquire` for the experts of its routing and runs them in the rounds of
the `PinnedExperts` that it gets. A missing expert takes the slot of what the policy values least.
If nothing is worth less than the newcomer, it borrows one of a few slots (`offload.pins.RING`), so
that a batch that touches everything streams past the hot set.

Every method belongs to the thread of the step loop, so nothing here locks: threads that read only
complete transfers. `statistics` and `residency` may be read from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import BudgetError, OffloadError
from offload.pins import RING, PinnedExperts, TierPin
from offload.policies import EvictionPolicy
from offload.slot_manager import ExpertSource, SlotManager
from offload.slots import SlotSizes, SlotTable
from offload.statistics import CacheStatistics

LEAST_SLOTS = 2
"""One to compute with while the other is filled."""


class SlotMemory(Protocol):
    """The memory behind the slots, in grains; see `offload.arena.Arena`."""

    @property
    def capacity(self) -> int: ...

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...


class ExpertCache:
    """Slots filled from a source under a policy.

    Args:
        sizes: of the experts.
        slots: how many experts, on average, there may be room for now.
        memory: of the slots.
        source: reads missing experts.
        policy: made for as many layers, and for the largest E as width.

    Attributes:
        prefixed: whether any expert may be read by a prefix.

    Raises:
        BudgetError: fewer slots than `LEAST_SLOTS`.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        slots: int,
        memory: SlotMemory,
        source: ExpertSource,
        policy: EvictionPolicy,
    ) -> None:
        self.policy = policy
        self.statistics = CacheStatistics(len(sizes.experts))
        self.sizes, self.expert_bytes = sizes, sizes.mean_bytes
        self.prefixed = sizes.prefixes != sizes.grains
        self._memory = memory
        grains = self._affordable(slots)
        memory.resize(grains)
        self._table = SlotTable(sizes, grains, memory.capacity)
        self._manager = SlotManager(self._table, source, policy, self.statistics)

    @property
    def slots(self) -> int:
        """Number of experts that there is room for now; a mean if they have different sizes."""
        return self.sizes.experts_in(len(self._table.owner))

    @property
    def present(self) -> NDArray[np.bool_]:
        """``(units,)``, live: the units that are there."""
        return self._table.present

    def residency(self) -> NDArray[np.int8]:
        """``(units,)``: 0 absent, 1 in flight, 2 there by a prefix of its bits, 3 there. A copy,
        from any thread: lists and dictionaries are copied whole, while no other thread runs."""
        there = np.where(self._table.present, 3, 0).astype(np.int8)
        if self.prefixed:
            short = np.array(self._table.grains) != np.array(self.sizes.grains)
            there[short & (there == 3)] = 2
        coming = list(self._manager.in_flight)
        there[coming] = np.where(there[coming] == 0, 1, there[coming])
        return there

    def bytes_of(self, layer: int) -> Sequence[int]:
        """Bytes of each expert of a layer, as it is read."""
        start = layer * self._table.width
        return self.sizes.nbytes[start : start + self.sizes.experts[layer]]

    def slot_ids(self, layer: int) -> Tensor:
        """``(E + 1,)`` int64, live: slot of each expert that is there, else -1; the last is -1, so
        that the unused slots of a routing (id -1) translate to -1."""
        return self._table.slot_ids(layer)

    def changes(self, layer: int) -> int:
        """Return how often `slot_ids` of a layer have changed."""
        return self._table.changes[layer]

    def resident(self, layer: int) -> Tensor:
        """``(E,)`` bool on the CPU: which experts of a layer are there."""
        self._manager.poll()
        start = layer * self._table.width
        return torch.tensor(self._table.present[start : start + self._table.experts[layer]])

    def poll(self) -> None:
        """Publish experts whose reads have ended."""
        self._manager.poll()

    def has(self, layer: int, expert: int) -> bool:
        """Return whether an expert is there, as of the last `poll` or `acquire`."""
        return bool(self._table.there[layer * self._table.width + expert])

    def missing(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Return the experts that are not there, as of the last `poll` or `acquire`."""
        start, there = layer * self._table.width, self._table.there
        return [expert for expert in experts if not there[start + expert]]

    def lacks(self, layer: int, expert: int) -> bool:
        """Return whether an expert is neither there nor in flight."""
        return self._table.slot[layer * self._table.width + expert] < 0

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Return the experts that it lacks."""
        return [expert for expert in experts if self.lacks(layer, expert)]

    def acquire(
        self,
        layer: int,
        experts: Sequence[int],
        on_cpu: Sequence[int] = (),
        prefixes: Collection[int] = (),
    ) -> PinnedExperts:
        """Pin experts of a layer, and begin to fetch those that are missing.

        Args:
            layer: MoE layer.
            experts: ascending and distinct.
            on_cpu: missing ones that the call also needs, and computes in host memory: counted as
                misses, and not fetched.
            prefixes: of the experts, those that may be there by a prefix; no more is fetched.

        Returns:
            The handle, whose `rounds` wait for what is fetched. A context manager that unpins.

        Raises:
            OffloadError: a read cannot even begin. Nothing is pinned.
        """
        manager, start = self._manager, layer * self._table.width
        asked = units = [start + expert for expert in experts]
        # 1. The policy learns what the call needs.
        if on_cpu:
            self.statistics.layers[layer].misses += len(on_cpu)
            asked = sorted([*units, *(start + expert for expert in on_cpu)])
        self.policy.touch(layer, asked)
        # 2. What has been read since, and what is still missing?
        if manager.in_flight:
            manager.poll()
        by_prefix: Collection[int] = ()
        if self.prefixed:
            by_prefix = {start + expert for expert in prefixes}
            manager.drop_prefixes(unit for unit in units if unit not in by_prefix)
        there = self._table.there
        missing = [unit for unit in units if not there[unit]]
        manager.count_call(layer, units, missing)
        # 3. Pin all of them, and begin to read the missing ones.
        return PinnedExperts(manager, layer, experts, units, missing, by_prefix)

    def found(self, layer: int, experts: Sequence[int]) -> None:
        """Count experts that compiled code has run in their slots: hits, ascending and distinct."""
        start = layer * self._table.width
        units = [start + expert for expert in experts]
        self.policy.touch(layer, units)
        self._manager.count_call(layer, units, [])

    def may_stay(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return the longest prefix of `experts` that a call may pin here until it ends: it leaves
        `RING` slots, of each size, to what the next tier copies meanwhile.

        Args:
            experts: that are there.
        """
        start = layer * self._table.width
        return experts[: self._table.room_beside([start + expert for expert in experts], RING)]

    def pin(self, layer: int, expert: int, *, urgent: bool) -> TierPin | None:
        """Pin an expert while the next tier copies it, and fetch it if it is absent.

        Returns:
            None: it has to wait for a slot.

        Raises:
            OffloadError: the read cannot even begin.
        """
        table, manager = self._table, self._manager
        unit, counters = layer * table.width + expert, self.statistics.layers[layer]
        manager.poll()
        if table.there[unit]:
            counters.hits += 1
            return TierPin(manager, unit)
        if unit not in manager.in_flight:
            if table.slot[unit] < 0:
                copied = sum(isinstance(pin, TierPin) for pin in manager.pins)
                if not copied:
                    manager.ranking.restart()
                # Like a call, a tier gives `RING` slots to whatever it needs, and no more.
                value = self.policy.values()[unit] if copied >= RING else math.inf
                if not manager.assign_if_worth(unit, self.sizes.grains[unit], value):
                    return None
            manager.fetch(unit, "demand" if urgent else "prefetch")
            manager.count_useful(unit)
        counters.misses += 1
        pin = TierPin(manager, unit)
        if urgent:
            pin.hasten()
        return pin

    def prefetch(self, layer: int, expert: int, *, value: float = 1.0) -> bool:
        """Begin to fetch an expert that may be needed.

        Args:
            layer, expert: which.
            value: probability that it is asked for when its layer comes next. It must be worth
                more to the policy than what it would evict.

        Returns:
            Whether a read began; False also if the expert is there or in flight already.
        """
        unit, manager = layer * self._table.width + expert, self._manager
        if self._table.slot[unit] >= 0:
            return False
        worth = self.policy.bid(unit, value)
        if not manager.assign_if_worth(unit, self.sizes.grains[unit], worth):
            return False
        try:
            manager.fetch(unit, "prefetch")
        except OffloadError:
            return False
        return True

    def cancel(self, layer: int, expert: int) -> bool:
        """Cancel a read that no call waits for, if it has not begun; returns whether it was."""
        return self._manager.cancel(layer * self._table.width + expert)

    def resize(self, slots: int) -> int:
        """Give back memory or take more, between steps; the most valuable units stay.

        Returns:
            Slots there are now: at most what the memory has room for.

        Raises:
            BudgetError: fewer than `LEAST_SLOTS`.
            OffloadError: a read does not end; nothing has changed.
        """
        grains, table, manager = self._affordable(slots), self._table, self._manager
        assert not manager.pins, "a cache is resized between steps"
        manager.settle_unpinned()
        if manager.in_flight:
            raise OffloadError("the cache cannot be resized while a read does not end")
        values, cut = self.policy.values(), table.owner[grains - 1 : grains].tolist()
        leaving = sorted(table.behind(grains), key=lambda unit: -values[unit])
        old = [(unit, table.slot[unit], table.grains[unit]) for unit in leaving]
        for unit in leaving:
            table.drop(unit)
        table.resize(grains)
        manager.ranking.restart(len(leaving))
        for unit, slot, kind in old:
            # A unit that lies across the border would be in the way of those moved from behind it.
            if unit not in cut and manager.assign_if_worth(unit, kind, values[unit]):
                self._memory.move(slot, table.slot[unit])
                table.publish(unit)
            else:
                manager.evict(unit)
        self._memory.resize(grains)
        return self.slots

    def hot_set(self) -> list[tuple[int, int]]:
        """(layer, expert) of what is there, most valuable first."""
        self._manager.poll()
        units = np.flatnonzero(self._table.present)
        order = np.argsort(-self.policy.values()[units], kind="stable")
        return [divmod(int(unit), self._table.width) for unit in units[order]]

    def drop(self, experts: Iterable[tuple[int, int]]) -> None:
        """Evict these (layer, expert) between steps, which this cache will not be asked for."""
        table, manager = self._table, self._manager
        manager.settle_unpinned()
        pinned = set(chain(*manager.pins.values()))
        for unit in (layer * table.width + expert for layer, expert in experts):
            if table.present[unit] and unit not in pinned:
                manager.evict(unit)

    def warm(self, hot_set: Iterable[tuple[int, int]]) -> int:
        """Read these (layer, expert) into free slots, and wait; experts that fail are left out.

        Returns:
            How many experts are there now.
        """
        table, manager = self._table, self._manager
        for layer, expert in hot_set:
            unit = layer * table.width + expert
            absent = table.slot[unit] < 0
            if absent and (slot := table.take_free(table.sizes.grains[unit])) is not None:
                table.place(unit, slot)
                with suppress(OffloadError):
                    manager.fetch(unit, "restored")
        for unit in list(manager.in_flight):
            with suppress(OffloadError):
                manager.wait_for(unit)
        return int(table.present.sum())

    def _affordable(self, slots: int) -> int:
        """The grains of this many slots, as far as there is memory."""
        grains = min(self.sizes.grains_for(slots), self._memory.capacity)
        largest, each = max(self.sizes.kinds), max(self.sizes.nbytes)
        if grains < LEAST_SLOTS * largest:
            raise BudgetError(
                f"an expert cache needs room for {LEAST_SLOTS} experts, "
                f"{LEAST_SLOTS * each} bytes at {each} bytes each; "
                f"there is room for {max(0, grains // largest)}: give the device more memory "
                "(memory.device_gib) or serve fewer bits"
            )
        return grains
