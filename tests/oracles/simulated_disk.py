"""A simulated disk, clock and memory, for the real cache and prefetcher around them."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Time that passes when it is told to.

    Args:
        counted: share of the processor time of the thread that asks which passes, too.
    """

    def __init__(self, counted: float = 0.0) -> None:
        self._counted, self._passed, self._aside = counted, 0.0, 0.0

    @property
    def processor_s(self) -> float:
        """Of the thread that asks, without what was done aside."""
        return time.thread_time() - self._aside

    def aside(self, work: Callable[[], object]) -> None:
        """No time passes meanwhile."""
        began = time.thread_time()
        work()
        self._aside += time.thread_time() - began

    @property
    def now(self) -> float:
        return self._passed + (self._counted * self.processor_s if self._counted else 0.0)

    @now.setter
    def now(self, later: float) -> None:
        self._passed += max(0.0, later - self.now)

    def __call__(self) -> float:
        return self.now


class Coming:
    """A transfer of the simulated disk."""

    def __init__(self, disk: Disk, urgent: bool) -> None:
        self.disk, self.urgent, self.asked = disk, urgent, disk.clock.now
        self.failed: Exception | None = None
        self.begun, self.end = False, float("inf")

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
    """A `Source` that reads one expert at a time, urgent ones first, each in ``read_s`` seconds."""

    def __init__(self, clock: Clock, read_s: float) -> None:
        self.clock, self.read_s, self.free_at = clock, read_s, 0.0
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
            first.begun, first.end = True, start + self.read_s
            self.free_at = first.end
            self.reads += 1


class Room:
    """Memory that nothing is put into."""

    capacity = 10_000

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...
