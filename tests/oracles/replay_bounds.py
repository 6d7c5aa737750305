"""Bounds for eviction policies on recorded routings: Belady above, random choice below."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from offload.policies import EvictionPolicy, Values
from offload.replay import Calls, ReplayedCache


def belady(
    calls: Calls,
    slots: int,
    foreseen: float = np.inf,
    rest: EvictionPolicy | None = None,
    width: int = 1,
) -> float:
    """Hit ratio of evicting the unit whose next use is farthest away (Belady).

    Args:
        calls: see `offload.replay`.
        slots: units that the cache holds.
        foreseen: how many calls ahead the future is known.
        rest: a new policy that ranks units without a known next use; needed if ``foreseen`` is
            finite.
        width: most experts of a layer.
    """
    units = max(map(max, calls)) + 1
    next_call = np.full(units, np.inf)
    following: list[Values] = []
    for number in range(len(calls) - 1, -1, -1):
        asked = list(calls[number])
        following.append(next_call[asked])
        next_call[asked] = number
    cache = ReplayedCache(units, slots)

    def values(number: int) -> Values:
        if rest is None:
            return -next_call
        known = next_call <= number + foreseen
        return np.where(known, 2.0 * len(calls) - next_call, rest.values()[:units])

    for number, (ids, after) in enumerate(zip(calls, reversed(following), strict=True)):
        next_call[list(ids)] = after
        if rest is not None:
            rest.touch(ids[0] // width, ids)
        cache.ask(ids, partial(values, number))
    return cache.hits / cache.asked


class RandomChoice:
    """Evicts at random."""

    name = "random"

    def __init__(self, num_layers: int, width: int) -> None:
        self._random, self._units = np.random.default_rng(0), num_layers * width

    def touch(self, layer: int, units: Sequence[int]) -> None:
        pass

    def values(self) -> Values:
        return self._random.random(self._units)

    def bid(self, unit: int, probability: float) -> float:
        return 1.0
