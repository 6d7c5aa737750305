"""Which experts lose their slots: `EvictionRanking` finds the least valuable ones that may go.

A hit saves reading as many bytes as the expert takes up, so a byte is worth what its expert is
worth, whatever the expert's size. A slot over several experts is worth the mean over its grains.

Ranking takes about as long as the policy needs to learn from a call. In a deep model a call
therefore ranks after it has begun its reads, for the next call: of many experts, little is known
better a call later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import numpy as np

from offload.policies import EvictionPolicy
from offload.slots import SlotTable

FEW = 2048
"""Up to this many units, a call ranks before it reads: it costs little, and values change more."""
SPARE = 16
"""Candidates beyond those that a call needs, for the prefetches that follow it: finding more at
once costs nothing, ranking again does."""

Candidate = tuple[float, int, list[int]]
"""A slot that may be had: its value, its number, and the unit in each of its grains (-1: none)."""


class EvictionRanking:
    """Ranks slots by the value of the units in them.

    Args:
        table: which unit is in which slot.
        policy: values units.
        in_flight: units on their way, live; they are not evicted.
        pins: the units of each pin, live; they are not evicted.

    Attributes:
        deferred: whether a call ranks for the next one.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: EvictionPolicy,
        in_flight: Collection[int],
        pins: Mapping[object, Collection[int]],
    ) -> None:
        self._table, self._policy, self._in_flight, self._pins = table, policy, in_flight, pins
        self._ranked: dict[int, deque[Candidate]] = {}  # by kind, least valuable first
        self._wanted = 0
        self._used: set[int] = set()  # asked for since they were ranked
        self.deferred = len(table.present) > FEW

    def spare(self, units: Iterable[int]) -> None:
        """Do not evict these by the present ranking: a call has just asked for them."""
        self._used.update(units)

    def restart(self, wanted: int = 0) -> None:
        """Rank again when a slot is needed; ``wanted`` newcomers are about to need one."""
        self._ranked.clear()
        self._used.clear()
        self._wanted = wanted

    def prepare(self) -> None:
        """Rank now, for the next call."""
        kinds = list(self._ranked)
        self.restart()
        for kind in kinds:
            self._ranked[kind] = deque(self._rank(kind))

    def cheapest(self, kind: int) -> Candidate | None:
        """The least valuable slot of ``kind`` grains whose units may go; None if there is none."""
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
                if self._used:  # rank them, too, by their new values
                    self.restart(self._wanted)
                self._ranked[kind] = deque(self._rank(kind))
        return None

    def _stays(self, unit: int) -> bool:
        """Return whether a ranked unit may not go now, or has become more valuable since."""
        if unit in self._used or unit in self._in_flight:
            return True
        for units in self._pins.values():  # noqa: SIM110 - `any` takes three times as long
            if unit in units:
                return True
        return False

    def _rank(self, kind: int) -> list[Candidate]:
        """The least valuable slots of a kind, cheapest first."""
        table, count, values = self._table, self._wanted + SPARE, self._policy.values()
        evictable = table.present.copy()
        evictable[[*chain(self._in_flight, *self._pins.values())]] = False
        if table.mixed:  # candidates are slots, else units
            owners = table.owner[: len(table.owner) // kind * kind]
            worth = np.where(evictable[owners], values[owners], np.inf)
            worth[owners < 0] = 0.0
            worth = worth.reshape(-1, kind).mean(1)
            (found,) = (worth < np.inf).nonzero()
            worth, found = worth[found], found + table.first_slot[kind]
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
