"""What an eviction policy is, and the two that everybody knows: LRU and LFU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class EvictionPolicy(Protocol):
    """Values units; the cache evicts the least valuable, and keeps out what is worth still less.

    A unit is an expert of a layer, numbered ``layer * width + expert``.
    """

    @property
    def name(self) -> str: ...

    def touch(self, layer: int, units: Sequence[int]) -> None:
        """A call of a layer asks for these units; once a call, in the order of the layers.

        The layer waits until this returns, so a policy only takes note here, and learns when
        `values` are read.
        """
        ...

    def values(self) -> Values:
        """``(units,)``: what each unit is worth keeping now, comparable between layers. Valid until
        the next call of any method."""
        ...

    def bid(self, unit: int, probability: float) -> float:
        """What a unit that is asked for with this probability when its layer comes next is worth
        prefetching, on the scale of `values`."""
        ...


class LRU:
    """Least recently used: a unit's value is the number of the call that asked for it last."""

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
    """Least frequently used: a unit's value is how many calls have ever asked for it."""

    name = "lfu"

    def __init__(self, num_layers: int, width: int) -> None:
        self._values: Values = np.zeros(num_layers * width)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._values[units] += 1

    def values(self) -> Values:
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return math.inf
