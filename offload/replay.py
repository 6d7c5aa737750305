"""Hit ratios of eviction policies on recorded routings, without any weights; for ``moe plan``.

A replay simplifies `offload.cache.ExpertCache` a little: it counts a call's hits, adds everything
that the call requested, and evicts the least valuable experts, new ones included. (The real cache
lends a slot for the call to a new expert that is worth less than all others.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.policies import EvictionPolicy, Values

Calls = Sequence[Sequence[int]]
"""Units that each call of an MoE layer requests, ascending: ``layer * width + expert``."""


def hit_ratio(calls: Calls, slots: int, policy: EvictionPolicy, width: int) -> float:
    """Share of the requested units that the cache held.

    Args:
        calls: in order; at least one, each of at least one unit.
        slots: units that the cache holds.
        policy: a new one.
        width: most experts of a layer.
    """
    cache = ReplayedCache(max(map(max, calls)) + 1, slots)
    for units in calls:
        policy.touch(units[0] // width, units)
        cache.ask(units, policy.values)
    return cache.hits / cache.asked


def calls_of(experts: NDArray[np.integer], width: int, batch: int = 1) -> list[list[int]]:
    """Calls of a decoding batch, whose sequences share the recorded tokens equally.

    Args:
        experts: ``(tokens, layers, top_k)``, -1 for an unused slot.
        width: most experts of a layer.
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


class ReplayedCache:
    """A cache of units without weights; `hits` and `asked` count units over all calls."""

    def __init__(self, units: int, slots: int) -> None:
        self._held = np.zeros(units, dtype=bool)
        self._slots, self._filled = slots, 0
        self.hits = self.asked = 0

    def ask(self, units: Iterable[int], values: Callable[[], Values]) -> None:
        """Count hits, add these units, and evict those of least value."""
        ids = list(units)
        hits = int(self._held[ids].sum())
        self.hits += hits
        self.asked += len(ids)
        self._held[ids] = True
        self._filled += len(ids) - hits
        surplus = self._filled - self._slots
        if surplus <= 0:
            return
        value = np.where(self._held, values()[: len(self._held)], np.inf)
        self._held[np.argpartition(value, surplus - 1)[:surplus]] = False
        self._filled = self._slots
