"""Filling slots: transfers under way, and who must go to make room for them.

A unit's slot is shown to kernels when its bytes have come, not before. A transfer that fails
leaves its unit without a slot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from offload.errors import OffloadError
from offload.policies import EvictionPolicy
from offload.slots import SlotTable
from offload.statistics import CacheStatistics, LayerStatistics
from offload.transfer import Transfer

# ---- Who must go: the least valuable units, found once for all who need room in a call of a
# layer.
#
# What a hit saves is reading as many bytes as it takes up, so a byte is worth what its unit is
# worth, whatever that one's size; a slot over several units, what its grains are worth on
# average.
#
# Finding them takes about as long as the policy needs to learn from what was asked for, so in a
# deep model it is done behind a call's reads, while they are under way, and for the next call: of
# what a layer of many asks for, little is known better a call later.

FEW = 2048
"""Units that are valued before anything is read: so few cost little, and say more of each other."""
SPARE = 16
"""Found beyond those that a call needs, for the prefetches that follow it: finding some more costs
nothing, finding them again does."""

Taken = tuple[float, int, list[int]]
"""What a slot is worth that may be had, its number, and who has which of its grains, -1 where
nobody does."""


class Victims:
    """Ranks slots by what a policy says that the units in them are worth.

    Args:
        table: what is there.
        policy: what it is worth.
        flying: units that are on their way, live.
        pins: of each holder the units it needs, live; none of either may go.

    Attributes:
        late: whether a call finds them for the next one.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: EvictionPolicy,
        flying: Collection[int],
        pins: Mapping[object, Collection[int]],
    ) -> None:
        self._table, self._policy, self._flying, self._pins = table, policy, flying, pins
        self._ranked: dict[int, deque[Taken]] = {}  # of each kind
        self._wanted = 0
        self._spared: set[int] = set()  # asked for since they were ranked
        self.late = len(table.present) > FEW

    def spare(self, units: Iterable[int]) -> None:
        """They are worth more than when they were ranked."""
        self._spared.update(units)

    def forget(self) -> None:
        """What things are worth has changed."""
        self.expect(0)

    def expect(self, wanted: int) -> None:
        """So many newcomers are about to ask: who goes for them is found at once."""
        self._ranked.clear()
        self._spared.clear()
        self._wanted = wanted

    def prepare(self) -> None:
        """Find now who goes in the next call."""
        kinds = list(self._ranked)
        self.expect(0)
        for kind in kinds:
            self._ranked[kind] = deque(self._rank(kind))

    def cheapest(self, kind: int) -> Taken | None:
        """The least valuable slot of so many grains whose units may go; None where there is
        none."""
        table = self._table
        for again in (True, False):
            ranked = self._ranked.get(kind)
            while ranked:
                _, slot, owners = ranked[0]
                mixed = table.mixed
                same = table.owners(kind, slot) == owners if mixed else table.there[owners[0]]
                if same and not any(map(self._stays, owners)):
                    return ranked[0]
                ranked.popleft()
            if again:
                if self._spared:  # they come back, at what they are worth now
                    self.expect(self._wanted)
                self._ranked[kind] = deque(self._rank(kind))
        return None

    def _stays(self, unit: int) -> bool:
        """Whether a unit that was ranked may not go now, or is worth more than it was then."""
        if unit in self._spared or unit in self._flying:
            return True
        for units in self._pins.values():  # noqa: SIM110 - `any` takes three times as long
            if unit in units:
                return True
        return False

    def _rank(self, kind: int) -> list[Taken]:
        """The least valuable slots of a kind, cheapest first."""
        table, count, values = self._table, self._wanted + SPARE, self._policy.values()
        evictable = table.present.copy()
        evictable[[*chain(self._flying, *self._pins.values())]] = False
        if table.mixed:  # slots are candidates, else units
            owners = table.owner[: len(table.owner) // kind * kind]
            worth = np.where(evictable[owners], values[owners], np.inf)
            worth[owners < 0] = 0.0
            worth = worth.reshape(-1, kind).mean(1)
            (found,) = (worth < np.inf).nonzero()
            worth, found = worth[found], found + table.first_slot(kind)
        else:
            (found,) = evictable.nonzero()
            worth = values[found]
        if count < len(worth):
            lowest = worth.argpartition(count)[:count]
            found, worth = found[lowest], worth[lowest]
        order = worth.argsort(kind="stable")
        pairs = zip(worth[order].tolist(), found[order].tolist(), strict=True)
        if table.mixed:
            return [(value, slot, table.owners(kind, slot)) for value, slot in pairs]
        return [(value, table.slot[unit], [unit]) for value, unit in pairs]


# ----


class Source(Protocol):
    """Where a missing expert comes from."""

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Transfer:
        """Begin to fill a slot; biases and the like are put there before this returns.

        Args:
            layer, expert: which.
            slot: of nobody else.
            urgent: a layer waits for it.

        Raises:
            OffloadError: it cannot even begin.
        """
        ...


class _Fetch(NamedTuple):
    transfer: Transfer
    generation: int
    cause: str


class Filling:
    """The slots' table together with what is on its way to them.

    Attributes:
        pins: of each holder, the units it needs.
        victims: who goes next.
        lost_count: how many were evicted so far.
        lost_at: of each unit, which of these it was the last time; -inf where it never was.
    """

    def __init__(
        self,
        table: SlotTable,
        source: Source,
        policy: EvictionPolicy,
        statistics: CacheStatistics,
    ) -> None:
        self.table, self.policy, self.statistics = table, policy, statistics
        self.pins: dict[object, Sequence[int]] = {}
        self._source = source
        self._flying: dict[int, _Fetch] = {}
        self._unasked: dict[int, int] = {}  # prefetched and asked for by nobody yet: bytes
        self.lost_count, self.lost_at = 0, [-math.inf] * len(table.slot)
        self.victims = Victims(table, policy, self._flying, self.pins)

    def counters(self, unit: int) -> LayerStatistics:
        return self.statistics.layers[unit // self.table.width]

    def poll(self) -> None:
        """Take note of transfers that have ended. Failures are counted and otherwise forgotten:
        whoever still needs the unit fetches it again."""
        for unit in [unit for unit, fetch in self._flying.items() if fetch.transfer.done]:
            self._settle(unit)

    @property
    def busy(self) -> bool:
        return bool(self._flying)

    def asked(self, layer: int, units: Sequence[int], missing: Sequence[int]) -> None:
        """Count a call's units, and hasten what of them is on its way."""
        self.victims.spare(units)
        counters = self.statistics.layers[layer]
        counters.hits += len(units) - len(missing)
        if self._unasked:
            for unit in units:
                counters.useful_bytes += self._unasked.pop(unit, 0)
        if not missing:
            return
        counters.misses += len(missing)
        for unit in missing:
            if fetch := self._flying.get(unit):
                counters.late += fetch.cause == "prefetch"
                fetch.transfer.hasten()

    def begin(self, unit: int, cause: str) -> None:
        """Fetch a unit that has a slot and is not there.

        Args:
            cause: whose bytes they are: ``demand``, ``streamed``, ``prefetch`` or ``restored``.

        Raises:
            OffloadError: it cannot begin; the unit has lost its slot.
        """
        table = self.table
        layer, expert = divmod(unit, table.width)
        urgent = cause in ("demand", "streamed")
        slot, counters = table.slot[unit], self.statistics.layers[layer]
        try:
            transfer = self._source.fetch(layer, expert, slot, urgent=urgent)
        except OffloadError:
            counters.failures += 1
            table.drop(unit)
            raise
        self._flying[unit] = _Fetch(transfer, table.generation[slot], cause)
        counters.prefetches += cause == "prefetch"
        self._count(counters, unit, cause, table.sizes.kinds[table.grains[unit]])

    def arrive(self, unit: int) -> None:
        """Wait until a unit with a slot is there.

        Raises:
            OffloadError: it does not come.
        """
        counters = self.counters(unit)
        while not self.table.there[unit]:
            if unit not in self._flying:
                self.begin(unit, "demand")
            transfer = self._flying[unit].transfer
            try:
                counters.stall_seconds += transfer.wait()
            finally:
                if transfer.done:  # else it hangs: its slot stays taken until it has ended
                    self._settle(unit)

    def is_flying(self, unit: int) -> bool:
        return unit in self._flying

    def coming(self, unit: int) -> Transfer:
        """What brings a unit that is on its way."""
        return self._flying[unit].transfer

    def claim(self, unit: int) -> None:
        """Somebody asks for what may have been prefetched."""
        self.counters(unit).useful_bytes += self._unasked.pop(unit, 0)

    def make_room(self, unit: int, kind: int, worth: float) -> bool:
        """A slot of so many grains for a unit, free or of something worth less; whether there is
        one."""
        taken = self.room_for(kind)
        if taken is None or taken[0] >= worth:
            return False
        self.give(unit, taken)
        return True

    def room_for(self, kind: int) -> Taken | None:
        """The slot of so many grains that a unit would have: a free one, worth less than anything,
        it must have; None where all are in use."""
        slot = self.table.take_free(kind)
        return self.victims.cheapest(kind) if slot is None else (-math.inf, slot, [])

    def give(self, unit: int, taken: Taken) -> None:
        """A slot to a unit, instead of those who have it."""
        _, slot, owners = taken
        for other in owners:
            if other >= 0 and self.table.slot[other] >= 0:
                self.lost(other)
                self.table.drop(other)
        self.table.place(unit, slot)

    def lost(self, unit: int) -> None:
        """Count a unit that must go."""
        self.lost_count += 1
        self.lost_at[unit] = self.lost_count
        counters = self.counters(unit)
        counters.evictions += 1
        counters.wasted_bytes += self._unasked.pop(unit, 0)

    def drop_prefixes(self, units: Iterable[int]) -> None:
        """All of these is asked for: those of which there is a prefix are to be read again."""
        table = self.table
        for unit in units:
            if table.slot[unit] < 0 or table.is_whole(unit):
                continue
            if self.is_flying(unit):  # for a call that has failed
                with suppress(OffloadError):
                    self.arrive(unit)
            if table.slot[unit] >= 0 and not self.is_flying(unit):
                self.counters(unit).refined += 1
                table.drop(unit)

    def settle_unpinned(self) -> None:
        """Take back or wait for all transfers that nobody holds; failures are counted only."""
        pinned = {unit for units in self.pins.values() for unit in units}
        for unit in [unit for unit in self._flying if unit not in pinned]:
            if not self.cancel(unit):
                with suppress(OffloadError):
                    self.arrive(unit)

    def finish(self) -> None:
        """Wait for all transfers; failures are counted only."""
        for unit in list(self._flying):
            with suppress(OffloadError):
                self.arrive(unit)

    def cancel(self, unit: int) -> bool:
        """Take back a transfer that has not begun."""
        fetch = self._flying.get(unit)
        pinned = any(unit in units for units in self.pins.values())
        if fetch is None or pinned or not fetch.transfer.cancel():
            return False
        del self._flying[unit]
        counters = self.counters(unit)
        counters.cancelled += 1
        self._count(counters, unit, fetch.cause, -self.table.sizes.kinds[self.table.grains[unit]])
        self.table.drop(unit)
        return True

    def _count(self, counters: LayerStatistics, unit: int, cause: str, nbytes: int) -> None:
        if cause == "prefetch" and (nbytes > 0 or unit in self._unasked):
            self._unasked[unit] = self._unasked.get(unit, 0) + nbytes
            return
        # A prefetch that is taken back after somebody asked for it was counted as useful by then.
        name = f"{'useful' if cause == 'prefetch' else cause}_bytes"
        setattr(counters, name, getattr(counters, name) + nbytes)

    def _settle(self, unit: int) -> None:
        fetch = self._flying.pop(unit)
        assert self.table.generation[self.table.slot[unit]] == fetch.generation, "stale transfer"
        if fetch.transfer.failed is None:
            self.table.publish(unit)
            return
        counters = self.counters(unit)
        counters.failures += 1
        counters.wasted_bytes += self._unasked.pop(unit, 0)
        self.table.drop(unit)
