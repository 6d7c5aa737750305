"""The interface of an eviction policy, and the two classic ones: LRU and LFU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class EvictionPolicy(Protocol):
    """Values units. The cache evicts the least valuable, and does not admit what is worth less.

    A unit is an expert of a layer, numbered ``layer * width + expert``.
    """

    @property
    def name(self) -> str: ...

    def touch(self, layer: int, units: Sequence[int]) -> None:
        """Note the units that a layer requests; called once for each call, in order.

        The layer waits until this returns, so a policy only takes notes here, and learns when
        `values` are read.
        """
        ...

    def values(self) -> Values:
        """``(units,)``: how valuable each unit is now, comparable between layers. Valid until the
        next call of any method."""
        ...

    def bid(self, unit: int, probability: float) -> float:
        """The value, on the scale of `values`, of prefetching a unit that its layer's next call
        requests with this probability."""
        ...


class LRU:
    """Least recently used: a unit's value is the number of the call that requested it last."""

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


class LFU:
    """Least frequently used: a unit's value is how many calls have requested it so far."""

    name = "lfu"

    def __init__(self, num_layers: int, width: int) -> None:
        self._values: Values = np.zeros(num_layers * width)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._values[units] += 1

    def values(self) -> Values:
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return math.inf
