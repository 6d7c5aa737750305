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
from offload.slots import Sizes
from routing import Routing
from tests.offload.traces import EXPERTS, LAYERS, SLOTS, Guess, Trace

LOAD_S = 0.003


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Coming:
    """A transfer of the simulated disk."""

    def __init__(self, disk: Disk, urgent: bool) -> None:
        self.disk, self.urgent, self.asked = disk, urgent, disk.clock.now
        self.failed: Exception | None = None
        self.seconds, self.begun, self.end = LOAD_S, False, float("inf")

    @property
    def done(self) -> bool:
        self.disk.run()
        return self.end <= self.disk.clock.now

    def wait(self) -> float:
        start = self.disk.clock.now
        self.hasten()
        while not self.done:
            self.disk.clock.now = max(self.disk.clock.now, self.disk.free_at) + 1e-9
        if self.failed:
            raise self.failed
        return self.disk.clock.now - start

    def cancel(self) -> bool:
        self.disk.run()
        if not self.begun:
            self.disk.queue.remove(self)
        return not self.begun

    def hasten(self) -> None:
        self.urgent = True


class Disk:
    """A `Source` that reads one expert at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at = clock, 0.0
        self.queue: list[Coming] = []
        self.reads = 0

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Coming:
        self.run()
        self.queue.append(Coming(self, urgent))
        return self.queue[-1]

    def run(self) -> None:
        while self.queue and self.free_at <= self.clock.now:
            start = max(self.free_at, min(coming.asked for coming in self.queue))
            there = [coming for coming in self.queue if coming.asked <= start]
            first = min(there, key=lambda coming: not coming.urgent)
            self.queue.remove(first)
            first.begun, first.end = True, start + LOAD_S
            self.free_at = first.end
            self.reads += 1


class Room:
    capacity = 10_000

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...


class Run:
    """All steps of a trace through a cache, with or without prefetching."""

    def __init__(
        self, trace: Trace, guess: Guess | None, policy: str = "lru", layer_s: float = 0.004
    ) -> None:
        self.layer_s = layer_s
        self.clock = Clock()
        self.disk = Disk(self.clock)
        self.cache = ExpertCache(
            Sizes.equal([EXPERTS] * LAYERS, 1000),
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
            prefetcher.start(torch.zeros(1, 1, dtype=torch.int64))
        for layer, chosen in enumerate(layers):
            self.clock.now += self.layer_s / 2
            self.visit(layer, sorted(set(chosen.tolist())))

    def visit(self, layer: int, wanted: list[int]) -> None:
        routing = Routing(torch.tensor([wanted]), torch.ones(1, len(wanted)))
        with self.cache.acquire(layer, wanted) as held:
            if self.prefetcher:
                self.prefetcher.visit(layer, wanted, torch.zeros(1, 8), routing)
            for wave in held.waves:
                self.clock.now += self.layer_s / 2 * len(wave.experts) / max(1, len(wanted))

    @property
    def total(self) -> float:
        return sum(self.seconds)
