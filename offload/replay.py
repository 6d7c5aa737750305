"""Policies on recorded routings, without any data: hit ratios, with Random and Belady beside.

The rules of `ExpertCache`, a little simpler: hits are counted when a call asks, then everything it
asked for is there, and the least valuable go, newcomers like others (the cache lends these a slot
for the moment). Belady knows the future: the best that fetching on demand can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.policies import EvictionPolicy, Values

Calls = Sequence[Sequence[int]]
"""Units of each call, ascending; a unit is ``layer * width + expert``. The calls of a pass over the
layers come one after the other."""


def hit_ratio(calls: Calls, slots: int, policy: EvictionPolicy, width: int) -> float:
    """Share of the units asked for that were there.

    Args:
        calls: at least one, each of at least one unit.
        slots: room for so many units.
        policy: new.
        width: units of a layer.
    """
    cache = _Slots(max(map(max, calls)) + 1, slots)
    for units in calls:
        policy.touch(units[0] // width, units)
        cache.ask(units, policy.values)
    return cache.hits / cache.asked


def belady(
    calls: Calls,
    slots: int,
    foreseen: float = np.inf,
    rest: EvictionPolicy | None = None,
    width: int = 1,
) -> float:
    """Hit ratio of evicting what is asked for last in the future.

    Args:
        foreseen: calls that the future is known for.
        rest: a new policy, that ranks what is not asked for in them; needed where that is not all.
        width: units of a layer.
    """
    units = max(map(max, calls)) + 1
    next_call = np.full(units, np.inf)
    following: list[Values] = []
    for number in range(len(calls) - 1, -1, -1):
        asked = list(calls[number])
        following.append(next_call[asked])
        next_call[asked] = number
    cache = _Slots(units, slots)

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
    """Evicts anything: the yardstick from below."""

    name = "random"

    def __init__(self, num_layers: int, width: int) -> None:
        self._random, self._units = np.random.default_rng(0), num_layers * width

    def touch(self, layer: int, units: Sequence[int]) -> None:
        pass

    def values(self) -> Values:
        return self._random.random(self._units)

    def bid(self, unit: int, probability: float) -> float:
        return 1.0


def calls_of(experts: NDArray[np.integer], width: int, batch: int = 1) -> list[list[int]]:
    """Calls of a decoding batch: each sequence has an equal share of the recorded tokens.

    Args:
        experts: ``(tokens, layers, top_k)``, -1 for an unused slot.
        width: units of a layer.
        batch: sequences that decode together, one token each a step.
    """
    steps = len(experts) // batch
    streams = experts[: steps * batch].reshape(batch, steps, *experts.shape[1:])
    calls = []
    for step in range(steps):
        for layer in range(experts.shape[1]):
            asked = np.unique(streams[:, step, layer])
            calls.append((asked[asked >= 0] + layer * width).tolist())
    return calls


class _Slots:
    def __init__(self, units: int, slots: int) -> None:
        self._there = np.zeros(units, dtype=bool)
        self._slots, self._filled = slots, 0
        self.hits = self.asked = 0

    def ask(self, units: Iterable[int], values: Callable[[], Values]) -> None:
        ids = list(units)
        there = self._there[ids]
        hits = int(there.sum())
        self.hits += hits
        self.asked += len(ids)
        self._there[ids] = True
        self._filled += len(ids) - hits
        surplus = self._filled - self._slots
        if surplus <= 0:
            return
        value = np.where(self._there, values()[: len(self._there)], np.inf)
        self._there[np.argpartition(value, surplus - 1)[:surplus]] = False
        self._filled = self._slots
