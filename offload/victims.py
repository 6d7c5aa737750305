"""Who must go: the least valuable units, found once for all who need room in a call of a layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from offload.policies import Policy
from offload.slots import SlotTable

SPARE = 8
"""Found beyond those that a call needs, for the prefetches that follow it: finding some more costs
nothing, finding them again does."""


class Victims:
    """Ranks what is there by what a policy says it is worth.

    Args:
        table: what is there.
        policy: what it is worth.
        in_use: units that may not go now.
    """

    def __init__(
        self, table: SlotTable, policy: Policy, in_use: Callable[[], Iterable[int]]
    ) -> None:
        self._table, self._policy, self._in_use = table, policy, in_use
        self._ranked: deque[tuple[float, int]] = deque()

    def forget(self) -> None:
        """What things are worth has changed."""
        self._ranked.clear()

    def rank(self, wanted: int) -> None:
        """Find who goes for so many newcomers, and for some more."""
        self._ranked = deque(self.least(wanted + SPARE))

    def cheapest(self) -> tuple[float, int] | None:
        """What the least valuable unit that may go is worth, and which it is; None where all are in
        use."""
        for again in (True, False):
            in_use = set(self._in_use()) if self._ranked else set()
            while self._ranked:
                unit = self._ranked[0][1]
                if self._table.present[unit] and unit not in in_use:
                    return self._ranked[0]
                self._ranked.popleft()
            if again:
                self.rank(0)
        return None

    def least(self, count: int) -> list[tuple[float, int]]:
        """At most ``count`` units that may go, least valuable first, with their values."""
        evictable = self._table.present.copy()
        evictable[list(self._in_use())] = False
        units = np.flatnonzero(evictable)
        values = self._policy.values()[units]
        if count < len(values):
            lowest = np.argpartition(values, count)[:count]
            units, values = units[lowest], values[lowest]
        order = np.argsort(values, kind="stable")
        return list(zip(values[order].tolist(), units[order].tolist(), strict=True))
