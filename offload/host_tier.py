"""Copies experts from host memory into the slots of a GPU, beside its computing.

`HostSource` is the source of a GPU's cache. What host memory lacks, its own cache reads from disk
first. Copies whose bytes are there are launched together, with one event behind them: the compute
stream waits for it, the host does not. A copy begins when the kernels are done that were launched
before its slot was given away. An expert stays pinned in host memory until its copy has ended.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from offload.arena import Arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.pins import TierPin
from offload.statistics import CacheStatistics
from offload.streams import Delay, Event, Streams


class HostSource:
    """Fills slots of a GPU; see `offload.slot_manager.ExpertSource`. Belongs to the step loop.

    Args:
        host: the experts in host memory; only this source uses it.
        host_slots: its slots.
        gpu_slots: the slots to be filled.
        streams: of the GPU.
    """

    def __init__(
        self, host: ExpertCache, host_slots: Arena, gpu_slots: Arena, streams: Streams
    ) -> None:
        self.streams = streams
        self._host, self._host_slots, self._gpu_slots = host, host_slots, gpu_slots
        self._waiting: list[Copy] = []  # for bytes in host memory, or to be launched
        self._batches: deque[CopyBatch] = deque()  # launched, and not known to have ended
        self._delays: list[tuple[int, Delay]] = []
        self._fetched = 0

    def copy_seconds(self) -> float:
        """Time to copy one expert, the best of some trials before there is anything in the
        slots."""
        best = float("inf")
        pairs = list(zip(self._host_slots.places(0), self._gpu_slots.places(0), strict=True))
        for _ in range(3):
            start = time.perf_counter()
            after = self.streams.record_event()
            self.streams.copy(pairs, after, lambda: self._gpu_slots.arrange([0])).synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Copy:
        self._fetched += 1
        copy = Copy(self, layer, expert, slot, urgent, self._fetched, self.streams.record_event())
        self._pin(copy)
        if copy.failed is not None:
            raise copy.failed
        self._waiting.append(copy)
        if not urgent:
            self.launch()
        return copy

    def launch(self) -> None:
        """Start all copies whose bytes are in host memory."""
        while self._batches and self._batches[0].event.query():
            for copy in self._batches.popleft().copies:
                copy.end()
        waiting, self._waiting, full = self._waiting, [], False
        ready: list[Copy] = []
        for copy in sorted(waiting, key=lambda copy: not copy.urgent):
            if copy.pin is None and not full:
                full = not self._pin(copy)
            if copy.failed is None and (copy.pin is None or not copy.pin.ready):
                self._waiting.append(copy)
                continue
            if copy.pin is not None:
                copy.failed = copy.pin.failed
            if copy.failed is None:
                ready.append(copy)
            else:
                copy.end()
        if ready:
            pairs = [pair for copy in ready for pair in self._pairs(copy)]
            last = max(ready, key=lambda copy: copy.number)
            slots = [copy.slot for copy in ready]
            event = self.streams.copy(pairs, last.after, lambda: self._gpu_slots.arrange(slots))
            batch = CopyBatch(event, ready)
            self._batches.append(batch)
            for copy in ready:
                copy.batch = batch

    def wait_for_launch(self, copy: Copy) -> None:
        """Wait until a copy has been launched.

        Raises:
            OffloadError: its bytes cannot be read, or a read does not end.
        """
        copy.hasten()
        self.launch()
        while copy.batch is None:
            if copy.failed is not None:
                raise copy.failed
            reading = next((c.pin for c in (copy, *self._waiting) if c.pin is not None), None)
            if reading is not None:
                try:
                    reading.wait()
                except OffloadError:
                    if not reading.ready:  # it hangs, and so does everything behind it
                        raise
            elif self._batches:
                self._batches[0].event.synchronize()
            else:
                raise OffloadError(
                    f"no room in host memory for expert {copy.expert} of layer {copy.layer}: reads "
                    "that do not end hold all of it; give it more memory (memory.host_gib)"
                )
            self.launch()

    def order_behind(self, copy: Copy) -> None:
        """Let kernels launched from now on wait for a copy, and all that were launched with it."""
        assert copy.batch is not None
        if not copy.batch.done:
            self._delays.append((copy.layer, self.streams.wait_event(copy.batch.event)))
            copy.batch.awaited = True

    def cancel(self, copy: Copy) -> bool:
        """Cancel a copy if it has not been launched; returns whether it was cancelled."""
        if copy not in self._waiting:
            return False
        self._waiting.remove(copy)
        copy.failed = OffloadError("the copy was cancelled")
        copy.end(unused=True)
        return True

    def close(self) -> None:
        """Wait for what has been launched: its memory may be given back then."""
        for batch in self._batches:
            batch.event.synchronize()

    def count_stalls(self, statistics: CacheStatistics) -> None:
        """Add the seconds for which kernels have waited for copies since the last time."""
        waits = [(layer, delay, delay()) for layer, delay in self._delays]
        self._delays = [(layer, delay) for layer, delay, seconds in waits if seconds is None]
        for layer, _, seconds in waits:
            statistics.layers[layer].stall_seconds += seconds or 0.0

    def _pin(self, copy: Copy) -> bool:
        """Ask for its bytes; returns whether host memory has room for them now."""
        try:
            copy.pin = self._host.pin(copy.layer, copy.expert, urgent=copy.urgent)
        except OffloadError as error:
            copy.failed = error
        return copy.pin is not None or copy.failed is not None

    def _pairs(self, copy: Copy) -> list[tuple[Tensor, Tensor]]:
        assert copy.pin is not None
        host, gpu = self._host_slots, self._gpu_slots
        sources = host.places(copy.pin.slot) + host.biases(copy.pin.slot)
        targets = gpu.places(copy.slot) + gpu.biases(copy.slot)
        return [
            (source[: len(target)], target)  # of which a prefix may do
            for source, target in zip(sources, targets, strict=True)
        ]


@dataclass(eq=False)
class CopyBatch:
    """Copies that were launched together."""

    event: Event
    copies: list[Copy]
    awaited: bool = False

    @property
    def done(self) -> bool:
        """Return whether kernels launched from now on find the bytes."""
        return self.awaited or self.event.query()


class Copy:
    """An expert on its way to the GPU; see `offload.transfer.Transfer`. Waiting for it holds up
    the compute stream, and the host only while its bytes are read from disk."""

    def __init__(
        self,
        source: HostSource,
        layer: int,
        expert: int,
        slot: int,
        urgent: bool,
        number: int,
        after: Event,
    ) -> None:
        self.layer, self.expert, self.slot = layer, expert, slot
        self.urgent, self.number, self.after = urgent, number, after
        self.pin: TierPin | None = None
        self.batch: CopyBatch | None = None
        self.failed: Exception | None = None
        self._source = source

    @property
    def done(self) -> bool:
        if self.batch is None and self.failed is None and (self.pin is None or self.pin.ready):
            self._source.launch()
        return self.failed is not None or (self.batch is not None and self.batch.done)

    def wait(self) -> float:
        start = time.perf_counter()
        self._source.wait_for_launch(self)
        self._source.order_behind(self)
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._source.cancel(self)

    def hasten(self) -> None:
        self.urgent = True
        if self.pin is not None:
            self.pin.hasten()

    def end(self, *, unused: bool = False) -> None:
        """Its bytes have come, or will never come."""
        if self.pin is not None:
            self.pin.release(unused=unused)
            self.pin = None
