"""The slots of one cache: which experts are read into them, and which are evicted for these.

`SlotManager` joins the table of slots, the reads in flight, the pins and the eviction ranking.
`SlotManager.fetch` is the only place where a read begins (`ExpertSource.fetch`); the source is a
store's files (offload/open_store.py) or, for the slots of a GPU, host memory
(offload/host_tier.py). Kernels see a slot when its bytes have come, not before. If a read fails,
its unit loses the slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from offload.errors import OffloadError
from offload.eviction import Candidate, EvictionRanking
from offload.policies import EvictionPolicy
from offload.slots import SlotTable
from offload.statistics import CacheStatistics, LayerStatistics
from offload.transfer import Transfer


class ExpertSource(Protocol):
    """A source of missing experts."""

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Transfer:
        """Begin to fill a free slot with an expert; its biases are there when this returns.

        Args:
            urgent: a layer waits for it.

        Raises:
            OffloadError: the read cannot even begin.
        """
        ...


class _Fetch(NamedTuple):
    transfer: Transfer
    cause: str


class SlotManager:
    """Fills slots and empties them.

    Attributes:
        table: which unit is in which slot.
        in_flight: the fetch of each unit that is on its way.
        pins: the units of each pin, which are not evicted.
        ranking: which slots are evicted next.
    """

    def __init__(
        self,
        table: SlotTable,
        source: ExpertSource,
        policy: EvictionPolicy,
        statistics: CacheStatistics,
    ) -> None:
        self.table, self.policy, self.statistics = table, policy, statistics
        self.pins: dict[object, Sequence[int]] = {}
        self.in_flight: dict[int, _Fetch] = {}
        self.ranking = EvictionRanking(table, policy, self.in_flight, self.pins)
        self._source = source
        self._unused: dict[int, int] = {}  # bytes of prefetched units that no call has asked for

    def counters(self, unit: int) -> LayerStatistics:
        """Return the counters of the unit's layer."""
        return self.statistics.layers[unit // self.table.width]

    def count_call(self, layer: int, units: Sequence[int], missing: Sequence[int]) -> None:
        """Count what a call asks for, and hasten what of it is in flight."""
        self.ranking.spare(units)
        counters = self.statistics.layers[layer]
        counters.hits += len(units) - len(missing)
        if self._unused:
            for unit in units:
                counters.useful_bytes += self._unused.pop(unit, 0)
        if not missing:
            return
        counters.misses += len(missing)
        for unit in missing:
            if fetch := self.in_flight.get(unit):
                counters.late += fetch.cause == "prefetch"
                fetch.transfer.hasten()

    def count_useful(self, unit: int) -> None:
        """A tier asks for a unit, which may have been prefetched."""
        self.counters(unit).useful_bytes += self._unused.pop(unit, 0)

    def fetch(self, unit: int, cause: str) -> None:
        """Begin to read a unit that has a slot and is not there.

        Args:
            cause: counts the bytes: ``demand``, ``streamed``, ``prefetch`` or ``restored``.

        Raises:
            OffloadError: the read cannot begin; the unit has lost its slot.
        """
        table = self.table
        layer, expert = divmod(unit, table.width)
        urgent, counters = cause in ("demand", "streamed"), self.statistics.layers[layer]
        try:
            transfer = self._source.fetch(layer, expert, table.slot[unit], urgent=urgent)
        except OffloadError:
            counters.failures += 1
            table.drop(unit)
            raise
        self.in_flight[unit] = _Fetch(transfer, cause)
        counters.prefetches += cause == "prefetch"
        self._count_bytes(counters, unit, cause, table.sizes.kinds[table.grains[unit]])

    def poll(self) -> None:
        """Publish units whose reads have ended. Failed reads are counted and otherwise forgotten:
        a call that still needs the unit fetches it again."""
        for unit in [unit for unit, fetch in self.in_flight.items() if fetch.transfer.done]:
            self._finish(unit)

    def wait_for(self, unit: int) -> None:
        """Wait until a unit with a slot is there; fetch it if it is not in flight.

        Raises:
            OffloadError: it cannot be read.
        """
        counters = self.counters(unit)
        while not self.table.there[unit]:
            if unit not in self.in_flight:
                self.fetch(unit, "demand")
            transfer = self.in_flight[unit].transfer
            try:
                counters.stall_seconds += transfer.wait()
            finally:
                if transfer.done:  # else it hangs: its slot stays taken until it has ended
                    self._finish(unit)

    def settle_unpinned(self) -> None:
        """Cancel the reads that no pin needs, or wait for them; failures are only counted."""
        pinned = {unit for units in self.pins.values() for unit in units}
        for unit in [unit for unit in self.in_flight if unit not in pinned]:
            if not self.cancel(unit):
                with suppress(OffloadError):
                    self.wait_for(unit)

    def cancel(self, unit: int) -> bool:
        """Take back a read that no pin needs, if it has not begun; returns whether it was."""
        fetch = self.in_flight.get(unit)
        pinned = any(unit in units for units in self.pins.values())
        if fetch is None or pinned or not fetch.transfer.cancel():
            return False
        del self.in_flight[unit]
        table, counters = self.table, self.counters(unit)
        counters.cancelled += 1
        self._count_bytes(counters, unit, fetch.cause, -table.sizes.kinds[table.grains[unit]])
        table.drop(unit)
        return True

    def find_slot(self, kind: int) -> Candidate | None:
        """A slot of ``kind`` grains for a newcomer: a free one, of value -inf, else the least
        valuable one; None if all are in use."""
        slot = self.table.take_free(kind)
        return self.ranking.cheapest(kind) if slot is None else (-math.inf, slot, [])

    def assign(self, unit: int, candidate: Candidate) -> None:
        """Give a slot from `find_slot` to a unit; evict the units that have it."""
        _, slot, owners = candidate
        for other in owners:
            if other >= 0 and self.table.slot[other] >= 0:
                self.evict(other)
        self.table.place(unit, slot)

    def assign_if_worth(self, unit: int, kind: int, value: float) -> bool:
        """Give a unit of this value a slot that is free or worth less; returns whether it has."""
        candidate = self.find_slot(kind)
        if candidate is None or candidate[0] >= value:
            return False
        self.assign(unit, candidate)
        return True

    def evict(self, unit: int) -> None:
        """Count the unit as evicted, and free its slot if it has one."""
        counters = self.counters(unit)
        counters.evictions += 1
        counters.wasted_bytes += self._unused.pop(unit, 0)
        if self.table.slot[unit] >= 0:
            self.table.drop(unit)

    def drop_prefixes(self, units: Iterable[int]) -> None:
        """Drop those units that are there by a prefix only: a call needs all of their bits."""
        table = self.table
        for unit in units:
            if table.slot[unit] < 0 or table.is_whole(unit):
                continue
            if unit in self.in_flight:  # for a call that has failed
                with suppress(OffloadError):
                    self.wait_for(unit)
            if table.slot[unit] >= 0 and unit not in self.in_flight:
                self.counters(unit).refined += 1
                table.drop(unit)

    def _finish(self, unit: int) -> None:
        """A read has ended, well or not."""
        transfer = self.in_flight.pop(unit).transfer
        if transfer.failed is None:
            self.table.publish(unit)
            return
        counters = self.counters(unit)
        counters.failures += 1
        counters.wasted_bytes += self._unused.pop(unit, 0)
        self.table.drop(unit)

    def _count_bytes(self, counters: LayerStatistics, unit: int, cause: str, nbytes: int) -> None:
        if cause == "prefetch" and (nbytes > 0 or unit in self._unused):
            self._unused[unit] = self._unused.get(unit, 0) + nbytes
            return
        # A prefetch that is cancelled after a call asked for it has been counted as useful.
        name = f"{'useful' if cause == 'prefetch' else cause}_bytes"
        setattr(counters, name, getattr(counters, name) + nbytes)
