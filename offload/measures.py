"""What time costs here: a missing expert, a layer, an eviction; followed as they change.

Taken from the cache's own counters between the arrivals at layers, so nothing else is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.cache import ExpertCache

FOLLOW = 0.05  # weight of what was measured last
DOUBT = 4.0
"""Evictions, half of them regretted, that are assumed before any has been seen."""


class Measures:
    """Follows one cache through the steps of a model.

    Attributes:
        load_seconds: for which one missing expert holds up the step loop.
        layer_seconds: from one MoE layer to the next, without waiting.
    """

    def __init__(
        self, cache: ExpertCache, num_layers: int, load_seconds: float, now: float
    ) -> None:
        self.load_seconds, self.layer_seconds = load_seconds, 0.0
        self._cache, self._keep = cache, 1 - FOLLOW / num_layers
        self._last = now
        self._layer: int | None = None
        self._stalled = 0.0  # of this layer, before it waited
        self._loads = 0  # that it waits for, none of which has been begun ahead
        self._late = [0] * num_layers  # of the cache's counters, when a layer was arrived at last
        self._evicted, self._regretted = DOUBT, DOUBT / 2
        self._lost = 0  # of the cache, when it was looked at last

    @property
    def loss_seconds(self) -> float:
        """What it costs to bring an expert in vain: what went for it may be asked for again while
        it would still have been there."""
        return self.load_seconds * self._regretted / self._evicted

    def start(self, now: float, followed: bool) -> None:
        """A step begins; ``followed`` says whether `arrive` heard of the one before."""
        self._last, self._layer = now, None
        if not followed:
            self._lost = self._cache.lost

    def arrive(self, layer: int, absent: Sequence[int], now: float) -> None:
        """A layer has asked for experts, ``absent`` is not there, and it waits for none yet."""
        stalled = 0.0 if self._layer is None else self._after(self._layer)
        spent = max(0.0, now - self._last - stalled)
        first = self.layer_seconds == 0.0
        self.layer_seconds += (1.0 if first else FOLLOW) * (spent - self.layer_seconds)
        self._last, self._layer = now, layer
        counters = self._cache.statistics.layers[layer]
        self._loads = 0 if counters.late > self._late[layer] else len(absent)
        self._late[layer], self._stalled = counters.late, counters.stall_seconds
        self._regret(layer, absent)

    def _after(self, layer: int) -> float:
        """Seconds for which the last layer has waited; 0 where they were reset meanwhile."""
        stall = max(0.0, self._cache.statistics.layers[layer].stall_seconds - self._stalled)
        if self._loads:
            self.load_seconds += FOLLOW * (stall / self._loads - self.load_seconds)
        return stall

    def _regret(self, layer: int, absent: Sequence[int]) -> None:
        """Evictions since the last visit, and of those asked for now the ones that would be there
        if a newcomer had not taken their place: as many as there are slots, and all are others."""
        cache = self._cache
        evicted, self._lost = cache.lost - self._lost, cache.lost
        slots = cache.slots
        lost = sum(cache.lost_since(layer, expert) <= slots for expert in absent)
        self._evicted = self._keep * self._evicted + max(evicted, lost)
        self._regretted = self._keep * self._regretted + lost
