"""Who must go: the least valuable units, found once for all who need room in a call of a layer.

What a hit saves is reading as many bytes as it takes up, so a byte is worth what its unit is worth,
whatever that one's size; a slot over several units, what its grains are worth on average.

Finding them takes about as long as the policy needs to learn from what was asked for, so in a deep
model it is done behind a call's reads, while they are under way, and for the next call: of what a
layer of many asks for, little is known better a call later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import numpy as np

from offload.policies import Policy
from offload.slots import SlotTable

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
        policy: Policy,
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
