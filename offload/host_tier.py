"""From host memory into the slots of a GPU; what host memory lacks is read from disk into it first.

Copies whose bytes are there are launched together, with one mark behind them: the compute stream
waits for it, the host does not. A copy begins when the kernels are done that were launched before
its slot was given away; an expert keeps its slot in host memory until its copy has ended.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.arena import Arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.pins import Loan
from offload.streams import Delay, Mark, Streams

# ---- Copies to a device as the cache sees them: transfers, of which many end with one mark.


class Launcher(Protocol):
    """The source of copies, as far as they need it."""

    def launch(self) -> None: ...
    def bring(self, copy: Copy) -> None: ...
    def follow(self, copy: Copy) -> None: ...
    def withdraw(self, copy: Copy) -> bool: ...


@dataclass(eq=False)
class Batch:
    """Copies that were launched together."""

    mark: Mark
    copies: list[Copy]
    followed: bool = False

    @property
    def done(self) -> bool:
        """Whether kernels launched from now on find the bytes."""
        return self.followed or self.mark.reached()


class Copy:
    """An expert on its way to the device; see `offload.transfer.Transfer`. Waiting for it holds up
    the compute stream, and the host only while its bytes are read from disk."""

    def __init__(
        self,
        source: Launcher,
        layer: int,
        expert: int,
        slot: int,
        urgent: bool,
        number: int,
        after: Mark,
    ) -> None:
        self.layer, self.expert, self.slot = layer, expert, slot
        self.urgent, self.number, self.after = urgent, number, after
        self.loan: Loan | None = None
        self.batch: Batch | None = None
        self.failed: Exception | None = None
        self._source = source

    @property
    def done(self) -> bool:
        if self.batch is None and self.failed is None and (self.loan is None or self.loan.ready):
            self._source.launch()
        return self.failed is not None or (self.batch is not None and self.batch.done)

    def wait(self) -> float:
        start = time.perf_counter()
        self._source.bring(self)
        self._source.follow(self)
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._source.withdraw(self)

    def hasten(self) -> None:
        self.urgent = True
        if self.loan is not None:
            self.loan.hasten()

    def end(self, *, unused: bool = False) -> None:
        """Its bytes have come, or will never come."""
        if self.loan is not None:
            self.loan.give_back(unused=unused)
            self.loan = None


# ----


class HostSource:
    """Fills slots of a device; see `offload.fetches.Source`. Belongs to the step loop.

    Args:
        host: the experts in host memory; used by nobody else meanwhile.
        near: its slots.
        device: the slots to be filled.
        streams: of the device.
    """

    def __init__(self, host: ExpertCache, near: Arena, device: Arena, streams: Streams) -> None:
        self.streams = streams
        self._host, self._near, self._device = host, near, device
        self._waiting: list[Copy] = []  # for bytes in host memory, or to be launched
        self._batches: deque[Batch] = deque()  # launched, and not known to have ended
        self._delays: list[tuple[int, Delay]] = []
        self._fetched = 0

    def copy_seconds(self) -> float:
        """For one expert, the best of some copies; before there is anything in the slots."""
        best = float("inf")
        pairs = list(zip(self._near.places(0), self._device.places(0), strict=True))
        for _ in range(3):
            start = time.perf_counter()
            self.streams.copy(pairs, self.streams.now()).wait()
            best = min(best, time.perf_counter() - start)
        return best

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Copy:
        self._fetched += 1
        copy = Copy(self, layer, expert, slot, urgent, self._fetched, self.streams.now())
        self._borrow(copy)
        if copy.failed is not None:
            raise copy.failed
        self._waiting.append(copy)
        if not urgent:
            self.launch()
        return copy

    def launch(self) -> None:
        """Start all copies whose bytes are in host memory."""
        while self._batches and self._batches[0].mark.reached():
            for copy in self._batches.popleft().copies:
                copy.end()
        waiting, self._waiting, full = self._waiting, [], False
        ready: list[Copy] = []
        for copy in sorted(waiting, key=lambda copy: not copy.urgent):
            if copy.loan is None and not full:
                full = not self._borrow(copy)
            if copy.failed is None and (copy.loan is None or not copy.loan.ready):
                self._waiting.append(copy)
                continue
            if copy.loan is not None:
                copy.failed = copy.loan.failed
            if copy.failed is None:
                ready.append(copy)
            else:
                copy.end()
        if ready:
            pairs = [pair for copy in ready for pair in self._pairs(copy)]
            last = max(ready, key=lambda copy: copy.number)
            batch = Batch(self.streams.copy(pairs, last.after), ready)
            self._batches.append(batch)
            for copy in ready:
                copy.batch = batch

    def bring(self, copy: Copy) -> None:
        """Wait until a copy has been launched.

        Raises:
            OffloadError: its bytes cannot be had, or a read does not end.
        """
        copy.hasten()
        self.launch()
        while copy.batch is None:
            if copy.failed is not None:
                raise copy.failed
            reading = next((c for c in (copy, *self._waiting) if c.loan is not None), None)
            if reading is not None and reading.loan is not None:
                try:
                    reading.loan.wait()
                except OffloadError:
                    if not reading.loan.ready:  # it hangs, and so does everything behind it
                        raise
            elif self._batches:
                self._batches[0].mark.wait()
            else:
                raise OffloadError(
                    f"no room in host memory for expert {copy.expert} of layer {copy.layer}: reads "
                    "that do not end hold all of it; give it more memory (memory.host_gib)"
                )
            self.launch()

    def follow(self, copy: Copy) -> None:
        """Let kernels launched from now on wait for a copy, and all that were launched with it."""
        assert copy.batch is not None
        if not copy.batch.done:
            self._delays.append((copy.layer, self.streams.follow(copy.batch.mark)))
            copy.batch.followed = True

    def withdraw(self, copy: Copy) -> bool:
        """Whether a copy had not been launched, and now never will."""
        if copy not in self._waiting:
            return False
        self._waiting.remove(copy)
        copy.failed = OffloadError("the copy was cancelled")
        copy.end(unused=True)
        return True

    def close(self) -> None:
        """Wait for what has been launched: its memory may be given back then."""
        for batch in self._batches:
            batch.mark.wait()

    def take_delays(self) -> list[tuple[int, float]]:
        """Layers that kernels waited for since the last time, and the seconds."""
        found = [(layer, delay, delay.seconds()) for layer, delay in self._delays]
        self._delays = [(layer, delay) for layer, delay, seconds in found if seconds is None]
        return [(layer, seconds) for layer, _, seconds in found if seconds is not None]

    def _borrow(self, copy: Copy) -> bool:
        """Ask for its bytes; whether host memory has room for them now."""
        try:
            copy.loan = self._host.lend(copy.layer, copy.expert, urgent=copy.urgent)
        except OffloadError as error:
            copy.failed = error
        return copy.loan is not None or copy.failed is not None

    def _pairs(self, copy: Copy) -> list[tuple[Tensor, Tensor]]:
        assert copy.loan is not None
        near, device = self._near, self._device
        sources = near.places(copy.loan.slot) + near.biases(copy.loan.slot)
        targets = device.places(copy.slot) + device.biases(copy.slot)
        return [
            (source[: len(target)], target)  # of which a prefix may do
            for source, target in zip(sources, targets, strict=True)
        ]
