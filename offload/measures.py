"""What time costs here: a missing expert, a layer, an eviction; followed as they change.

Taken from the cache's own counters between the arrivals at layers, so nothing else is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offload.cache import ExpertCache

FOLLOW = 0.05  # weight of what was measured last
DOUBT = 4.0
"""Evictions, half of them regretted, that are assumed before any has been seen."""
LONGEST = 1000.0


class Measures:
    """Follows one cache through the steps of a model.

    Attributes:
        load_seconds: for which one missing expert holds up the step loop.
        layer_seconds: from one MoE layer to the next, without waiting.
    """

    def __init__(
        self, cache: ExpertCache, experts: Sequence[int], load_seconds: float, now: float
    ) -> None:
        self.load_seconds, self.layer_seconds = load_seconds, 0.0
        self._cache = cache
        self._step, self._last = 0, now
        self._layer: int | None = None
        self._loads = 0  # that it waits for, none of which a bid has begun
        self._width = max(experts)
        self._seen = [np.full(count, -np.inf) for count in experts]  # step when it was there last
        self._evicted, self._regretted = DOUBT, DOUBT / 2
        self._evictions_a_step, self._evictions_now = 0.0, 0
        self._before = [self._counters(layer) for layer in range(len(experts))]

    @property
    def loss_seconds(self) -> float:
        """What it costs to bring an expert in vain: what went for it may be asked for again while
        it would still have been there."""
        return self.load_seconds * self._regretted / self._evicted

    def start(self, now: float, followed: bool) -> None:
        """A step begins; ``followed`` says whether `arrive` heard of the one before."""
        self._step += 1
        self._last, self._layer = now, None
        if followed:
            self._evictions_a_step += FOLLOW * (self._evictions_now - self._evictions_a_step)
        else:
            self._before = [self._counters(layer) for layer in range(len(self._seen))]
        self._evictions_now = 0

    def arrive(self, layer: int, wanted: Sequence[int], now: float) -> float:
        """A layer has asked for these experts, and waits for none of them yet.

        Returns:
            Seconds since the last arrival for which it waited.
        """
        stalled = 0.0 if self._layer is None else self._after(self._layer)
        spent = max(0.0, now - self._last - stalled)
        first = self.layer_seconds == 0.0
        self.layer_seconds += (1.0 if first else FOLLOW) * (spent - self.layer_seconds)
        self._last, self._layer = now, layer
        there = self._cache.present[layer * self._width :]
        absent = [expert for expert in wanted if not there[expert]]
        _, _, late, evicted = self._since(layer)
        self._loads = 0 if late else len(absent)
        self._regret(layer, absent, int(evicted))
        self._before[layer] = self._counters(layer)
        return stalled

    def _after(self, layer: int) -> float:
        """Take note of what the last layer's call has cost."""
        stall = self._since(layer)[0]
        if self._loads:
            self.load_seconds += FOLLOW * (stall / self._loads - self.load_seconds)
        return stall

    def _regret(self, layer: int, absent: Sequence[int], evicted: int) -> None:
        """Evictions since the last visit, and of those asked for now the ones that would be there
        if a newcomer had not taken their place."""
        self._evictions_now += evicted
        seen = self._seen[layer]
        there = self._cache.present[layer * self._width :][: len(seen)]
        lifetime = min(LONGEST, self._cache.slots / max(self._evictions_a_step, 1e-9))
        still = self._step - lifetime
        lost = int(sum(seen[expert] >= still for expert in absent))
        seen[there] = self._step
        keep = 1 - FOLLOW / len(self._seen)
        self._evicted = keep * self._evicted + max(evicted, lost)
        self._regretted = keep * self._regretted + lost

    def _counters(self, layer: int) -> tuple[float, ...]:
        counters = self._cache.statistics.layers[layer]
        return counters.stall_seconds, counters.misses, counters.late, counters.evictions

    def _since(self, layer: int) -> list[float]:
        """Counters since the last arrival at the layer; 0 where they were reset meanwhile."""
        pairs = zip(self._counters(layer), self._before[layer], strict=True)
        return [max(0.0, now - before) for now, before in pairs]
