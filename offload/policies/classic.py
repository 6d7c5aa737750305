"""Least recently used: what was asked for last is worth most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from offload.policies.base import Values


class LRU:
    """The value of a unit is the number of the call that last asked for it."""

    name = "lru"

    def __init__(self, num_layers: int, width: int) -> None:
        self._call = 0
        self._values: Values = np.zeros(num_layers * width)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._call += 1
        self._values[units] = self._call

    def values(self) -> Values:
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return math.inf


# ---- Least frequently used: what was asked for most often is worth most.


class LFU:
    """The value of a unit is how many calls have asked for it; nothing is forgotten."""

    name = "lfu"

    def __init__(self, num_layers: int, width: int) -> None:
        self._values: Values = np.zeros(num_layers * width)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._values[units] += 1

    def values(self) -> Values:
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return math.inf
