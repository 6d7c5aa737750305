"""Which of two voices to go by: each evicts from a cache of its own that holds nothing, and the one
that would have hit more of late is believed (set duelling, on units instead of sets).

Where units are many, a sample of them is followed, in as much less room. A challenger that costs
more time than its hits save rests, and is tried again later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from offload.policies.base import Values

FOLLOWED = 1024
"""Units at most."""
MEMORY = 0.998
"""How much of the advantage a visit keeps."""
DOUBT = 100
"""Visits without a difference that the first ones are averaged with."""
TRIAL = 1000
"""Visits before it is judged whether the challenger pays."""
REST, LONGEST_REST = 4096, 1 << 18
"""Visits that it rests; twice as many each time, at most so many."""


class Duel:
    """Between a challenger, which is believed at first, and a default.

    Attributes:
        advantage: hits a visit that the challenger has more, of late, of all units.

    Args:
        units: of all layers.
        room: how many of them the cache can hold now.
        load_seconds: that a hit saves; inf: time does not count.
    """

    def __init__(self, units: int, room: Callable[[], int], load_seconds: float) -> None:
        # Odd, so that the sample is not of the same experts of each layer.
        self._stride = 1 if units <= FOLLOWED else -(-units // FOLLOWED) | 1
        count = -(-units // self._stride)
        self._room, self._load_seconds = room, load_seconds
        self._visits, self._spent = 0, 0.0
        self._rest, self._next_rest = 0, REST
        self._there = np.zeros((2, count), dtype=bool)
        self.advantage = 0.0

    def visit(self, units: Sequence[int]) -> None:
        """These are asked for."""
        if self._rest:
            self._rest -= 1
            return
        stride, more = self._stride, 0.0
        if own := [unit // stride for unit in units if unit % stride == 0]:
            hits = np.add.reduce(self._there[:, own], axis=1)
            self._there[:, own] = True
            more = stride * (float(hits[0]) - float(hits[1]))
        self._visits += 1
        keep = min(MEMORY, 1 - 1 / (self._visits + DOUBT))
        self.advantage += (1 - keep) * (more - self.advantage)

    @property
    def rests(self) -> bool:
        """Whether the challenger is to be left in peace."""
        return self._rest > 0

    def pay(self, seconds: float) -> None:
        """So long the challenger took for a visit."""
        self._spent += (seconds - self._spent) / 16
        if self._visits < TRIAL or self._load_seconds == math.inf:
            return
        if self.advantage * self._load_seconds >= self._spent:
            self._next_rest = REST
            return
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._visits, self.advantage = 0, 0.0  # who was better long ago says little

    def settle(self, challenger: Values, default: Values) -> bool:
        """Evict by these ``(units,)`` values; whether the challenger's are to be believed."""
        slots = max(1, self._room() // self._stride)
        for there, values in zip(self._there, (challenger, default), strict=True):
            surplus = int(np.count_nonzero(there)) - slots
            if surplus > 0:
                worth = np.where(there, values[:: self._stride], np.inf)
                there[worth.argpartition(surplus - 1)[:surplus]] = False
        return self.advantage >= 0
