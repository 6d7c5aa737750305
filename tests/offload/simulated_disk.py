"""A simulated disk, clock and model around the real cache and prefetcher.

The disk reads one expert at a time, urgent ones first; computing a layer takes a fixed time.
Everything is a function of the trace and the predictor.
"""

from __future__ import annotations

import numpy as np
import torch

from offload.cache import ExpertCache
from offload.policies import POLICIES
from offload.prefetch import Prefetcher
from offload.slots import SlotSizes
from routing import Routing
from tests.offload.traces import EXPERTS, LAYERS, SLOTS, Guess, Trace
from tests.oracles.simulated_disk import Clock, Disk, Room

LOAD_S = 0.003


class Run:
    """All steps of a trace through a cache, with or without prefetching."""

    def __init__(
        self, trace: Trace, guess: Guess | None, policy: str = "lru", layer_s: float = 0.004
    ) -> None:
        self.layer_s = layer_s
        self.clock = Clock()
        self.disk = Disk(self.clock, LOAD_S)
        self.cache = ExpertCache(
            SlotSizes.equal([EXPERTS] * LAYERS, 1000),
            SLOTS,
            Room(),
            self.disk,
            POLICIES[policy](LAYERS, EXPERTS),
        )
        self.prefetcher = None
        if guess is not None:
            self.prefetcher = Prefetcher(
                self.cache, [EXPERTS] * LAYERS, guess, LOAD_S, clock=self.clock
            )
        self.seconds: list[float] = []
        for step, layers in enumerate(trace):
            begun = self.clock.now
            if guess is not None:
                guess.at(step)
            self._step(layers)
            self.seconds.append(self.clock.now - begun)

    def _step(self, layers: np.ndarray) -> None:
        prefetcher = self.prefetcher
        if prefetcher:
            prefetcher.start([[0]])
        for layer, chosen in enumerate(layers):
            self.clock.now += self.layer_s / 2
            self.visit(layer, sorted(set(chosen.tolist())))

    def visit(self, layer: int, wanted: list[int]) -> None:
        routing = Routing(torch.tensor([wanted]), torch.ones(1, len(wanted)))
        with self.cache.acquire(layer, wanted) as held:
            if self.prefetcher:
                self.prefetcher.visit(layer, wanted, torch.zeros(1, 8), routing)
            for ready in held.rounds:
                self.clock.now += self.layer_s / 2 * len(ready.experts) / max(1, len(wanted))

    @property
    def total(self) -> float:
        return sum(self.seconds)
