"""Which of two voices to go by: each evicts from a cache of its own that holds nothing, and the one
that would have hit more of late is believed (set duelling, on units instead of sets).

Where units are many, a sample of them is followed, in as much less room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from offload.policies.base import Values

FOLLOWED = 1024
"""Units at most."""
MEMORY = 0.998
"""How much of the advantage a visit keeps."""
DOUBT = 100
"""Visits without a difference that the first ones are averaged with."""


class Duel:
    """Between a challenger, which is believed at first, and a default.

    Attributes:
        advantage: hits a visit that the challenger has more, of late.
        visits: since the start.

    Args:
        units: of all layers.
        room: how many of them the cache can hold now.
    """

    def __init__(self, units: int, room: Callable[[], int]) -> None:
        # Odd, so that the sample is not of the same experts of each layer.
        self._stride = 1 if units <= FOLLOWED else -(-units // FOLLOWED) | 1
        count = -(-units // self._stride)
        self._room, self.visits = room, 0
        self._there = np.zeros((2, count), dtype=bool)
        self.advantage = 0.0

    def visit(self, units: Sequence[int]) -> None:
        """These are asked for."""
        own = [unit // self._stride for unit in units if unit % self._stride == 0]
        self.visits += 1
        if not own:
            return
        hits = np.add.reduce(self._there[:, own], axis=1)
        self._there[:, own] = True
        keep = min(MEMORY, 1 - 1 / (self.visits + DOUBT))
        self.advantage += (1 - keep) * (float(hits[0]) - float(hits[1]) - self.advantage)

    def restart(self) -> None:
        """Who was better long ago says little."""
        self.visits, self.advantage = 0, 0.0

    def settle(self, challenger: Values, default: Values) -> bool:
        """Evict by these ``(units,)`` values; whether the challenger's are to be believed."""
        slots = max(1, self._room() // self._stride)
        for there, values in zip(self._there, (challenger, default), strict=True):
            surplus = int(np.count_nonzero(there)) - slots
            if surplus > 0:
                worth = np.where(there, values[:: self._stride], np.inf)
                there[worth.argpartition(surplus - 1)[:surplus]] = False
        return self.advantage >= 0
