"""Open bids, and when the disk will have served them.

The disk is taken to serve one read after the other: those that a layer waits for, then the bids, in
the order in which they were made. It is followed twice, as it is and as it would be if the bids on
paper had been placed, because a bid behind too many others is not worth making.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offload.cache import ExpertCache


class Offer(NamedTuple):
    """An expert that may be worth a bid, with ``left`` seconds until its layer comes."""

    worth: float
    chance: float
    layer: int
    expert: int
    left: float


@dataclass
class Bid:
    """On one expert.

    Attributes:
        arrival: when it is expected to be there.
        placed: whether it has become a transfer, or is on paper only.
    """

    arrival: float
    placed: bool

    def rest(self, there: bool, now: float, load: float) -> float | None:
        """Seconds still missing when its layer is reached, at most ``load``; None if it came too
        early and has been evicted again.

        Args:
            there: whether the expert is there, which a bid on paper has nothing to do with.
        """
        expected = min(load, max(0.0, self.arrival - now))
        if not self.placed:
            return expected
        if there:
            return 0.0
        return None if now - self.arrival > load else max(expected, load / 2)


class Bids:
    """Of all layers; ``of[layer]`` maps experts to what has been bid.

    Attributes:
        read: seconds for which one read keeps the disk busy.
    """

    def __init__(self, cache: ExpertCache, num_layers: int, read: float) -> None:
        self.of: list[dict[int, Bid]] = [{} for _ in range(num_layers)]
        self.read = read
        self._cache = cache
        self._open: set[int] = set()  # layers with bids
        self._free_at = {True: 0.0, False: 0.0}  # when it has nothing more to do, by `placed`

    def arrival(self, placed: bool, now: float) -> float:
        """When the next bid would be there."""
        return max(now, self._free_at[placed]) + self.read

    def add(self, layer: int, expert: int, bid: Bid) -> None:
        """Its arrival is the one that `arrival` gave."""
        self.of[layer][expert] = bid
        self._open.add(layer)
        self._free_at[bid.placed] = bid.arrival

    def cancel(self, layer: int, expert: int) -> bool:
        """Take a placed one back, if it has not begun."""
        cancelled = self._cache.cancel(layer, expert)
        if cancelled:
            self._free_at[True] -= self.read
        return cancelled

    def clear(self) -> dict[int, int]:
        """Take back all; of each layer, how many placed ones were."""
        cancelled = {
            layer: sum(
                self.cancel(layer, expert) for expert, bid in self.of[layer].items() if bid.placed
            )
            for layer in self._open
        }
        for layer in self._open:
            self.of[layer].clear()
        self._open.clear()
        return cancelled

    def take(self, layer: int, now: float) -> dict[int, Bid]:
        """The bids on a layer that has been reached, which are open no more."""
        outstanding = {True: 0, False: 0}
        for target in self._open:
            for expert, bid in self.of[target].items():
                late = not self._cache.has(target, expert) if bid.placed else bid.arrival > now
                outstanding[bid.placed] += late
        for placed, count in outstanding.items():
            self._free_at[placed] = min(self._free_at[placed], now + count * self.read)
        self._open.discard(layer)
        taken, self.of[layer] = self.of[layer], {}
        return taken

    def give_way(
        self, absent: list[int], own: dict[int, Bid], now: float
    ) -> tuple[float, dict[int, float]]:
        """A layer waits for ``absent``, some of which it has bid on itself. They are read before
        all bids that have not begun.

        Returns:
            Seconds that it will wait; and of each layer, those for which bids on it that have begun
            stand in the way.
        """
        begun = {e for e, bid in own.items() if bid.placed and bid.arrival - self.read <= now}
        rest = max((own[e].arrival - now for e in begun.intersection(absent)), default=0.0)
        ahead = self.read * sum(expert not in begun for expert in absent)
        in_the_way: dict[int, float] = {}
        for target in self._open:
            for bid in self.of[target].values():
                if bid.arrival - self.read > now:
                    bid.arrival += ahead
                elif bid.arrival > now:
                    in_the_way[target] = in_the_way.get(target, 0.0) + bid.arrival - now
                    rest = max(rest, bid.arrival - now) if bid.placed else rest
        unbid = self.read * sum(expert not in own for expert in absent)
        for placed, free_at in self._free_at.items():
            self._free_at[placed] = max(now, free_at) + unbid
        return max(0.0, rest) + ahead, in_the_way
