"""Copies to a GPU beside its computing: the one module of this room that knows streams and events.

A device works through what it is given in order, on two queues: one of kernels (the *compute
stream*, torch's current one) and one of copies. The host runs ahead of both. A *mark* is a place in
a queue; all order between the queues, and between them and the host, is said with marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the work of a device."""

    def reached(self) -> bool:
        """Whether everything before it is done."""
        ...

    def wait(self) -> None:
        """The host waits until it is reached."""
        ...


class Delay(Protocol):
    """For how long the compute stream was held up somewhere."""

    def seconds(self) -> float | None:
        """None until it has gone on."""
        ...


class Streams(Protocol):
    """The two queues of one device; belongs to the thread that launches its kernels."""

    def now(self) -> Mark:
        """Behind all kernels that have been launched so far."""
        ...

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> Mark:
        """Copy sources to targets, once ``after`` is reached; the mark behind all of them.

        Args:
            pairs: sources stay as they are until then. Copies from memory that `pin` has not locked
                may hold up the host.
        """
        ...

    def follow(self, mark: Mark) -> Delay:
        """Kernels launched from now on run when the mark is reached; the host does not wait."""
        ...

    def bring(self, small: Tensor) -> Tensor:
        """A tensor of main memory on the device, for kernels launched from now on."""
        ...

    def pin(self, memory: Tensor) -> bool:
        """Lock pages of main memory, so that copies from there leave the host alone; False where
        the system refuses."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """What `pin` has locked as one piece; no copy of it may be under way."""
        ...


class CudaStreams:
    """See `Streams`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def now(self) -> CudaMark:
        return CudaMark(self._computing.record_event())

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> CudaMark:
        assert isinstance(after, CudaMark)
        self._copies.wait_event(after.event)
        with torch.cuda.stream(self._copies):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return CudaMark(self._copies.record_event())

    def follow(self, mark: Mark) -> CudaDelay:
        assert isinstance(mark, CudaMark)
        computing = self._computing
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(computing)
        computing.wait_event(mark.event)
        end.record(computing)
        return CudaDelay(begin, end)

    def bring(self, small: Tensor) -> Tensor:
        # From pageable memory the host would wait for all that the compute stream waits for.
        return small.pin_memory().to(self._device, non_blocking=True)

    def pin(self, memory: Tensor) -> bool:
        # torch's own pinned memory comes in powers of two, which may be twice of what is planned.
        runtime = torch.cuda.cudart()
        refused = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
        if refused:
            with suppress(RuntimeError):  # the next kernel reports the refusal; it is known
                torch.ones(1, device=self._device)
        return not refused

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


class CudaMark:
    """An event of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaDelay:
    """Between two events of one stream."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end

    def seconds(self) -> float | None:
        return self._begin.elapsed_time(self._end) / 1e3 if self._end.query() else None


def open_streams(device: torch.device) -> Streams | None:
    """Those of a device with memory of its own; None for a CPU."""
    return CudaStreams(device) if device.type == "cuda" else None
