"""The two streams of a GPU: kernels on one, copies beside them on the other.

Only this module of the room knows CUDA. A GPU works through each of its two streams in order; the
host runs ahead of both. All order between the streams, and between them and the host, is expressed
by events. The compute stream is torch's current one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the stream has passed it."""
        ...


Later = Callable[[], Tensor | None]
"""Gives what `Streams.to_host` copies; None until it has come."""
Delay = Callable[[], float | None]
"""Gives the seconds for which a stream waited for an event; None until it has gone on."""


class Streams(Protocol):
    """The two streams of one device; belongs to the thread that launches its kernels."""

    def record_event(self) -> Event:
        """An event behind all kernels that have been launched so far."""
        ...

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        after: Event,
        then: Callable[[], None] | None = None,
    ) -> Event:
        """Copy sources to targets when ``after`` has passed; returns the event behind all of them.

        Args:
            pairs: sources must not change until then. Copies from memory that `pin` has not locked
                may block the host.
            then: launches kernels behind the copies, on the same stream.
        """
        ...

    def wait_event(self, event: Event) -> Delay:
        """Let kernels launched from now on wait for the event; the host does not wait."""
        ...

    def to_gpu(self, small: Tensor) -> Tensor:
        """A tensor of main memory on the GPU, for kernels launched from now on."""
        ...

    def to_host(self, small: Tensor) -> Later:
        """A tensor of the GPU in main memory, as kernels launched so far leave it; the host does
        not wait."""
        ...

    def read(self, small: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the GPU in main memory, as kernels launched so far leave them; the host waits,
        once for all.

        Args:
            small: those with the widest elements first.
        """
        ...

    def pin(self, memory: Tensor) -> bool:
        """Lock pages of main memory, so that copies from there do not block the host; False if the
        system refuses."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """Unlock what `pin` has locked as one piece; no copy of it may be under way."""
        ...


class CudaStreams:
    """See `Streams`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def record_event(self) -> torch.cuda.Event:
        return self._computing.record_event()

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        after: Event,
        then: Callable[[], None] | None = None,
    ) -> torch.cuda.Event:
        assert isinstance(after, torch.cuda.Event)
        self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            if then is not None:
                then()
        return self._copies.record_event()

    def wait_event(self, event: Event) -> Delay:
        assert isinstance(event, torch.cuda.Event)
        computing = self._computing
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(computing)
        computing.wait_event(event)
        end.record(computing)
        return lambda: begin.elapsed_time(end) / 1e3 if end.query() else None

    def to_gpu(self, small: Tensor) -> Tensor:
        # From pageable memory the host would wait for all that the compute stream waits for.
        return small.pin_memory().to(self._device, non_blocking=True)

    def to_host(self, small: Tensor) -> Later:
        copy = torch.empty(small.shape, dtype=small.dtype, pin_memory=True)
        copy.copy_(small, non_blocking=True)
        event = self.record_event()
        return lambda: copy if event.query() else None

    def read(self, small: Sequence[Tensor]) -> list[Tensor]:
        return unpacked(packed(small).cpu(), small)

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


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes one after the other, uint8: a single one's without a copy."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `packed`; views. An element's size is a multiple of those behind it."""
    parts = data.split([tensor.nbytes for tensor in like])
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, like, strict=True)]


def open_streams(device: torch.device) -> Streams | None:
    """The streams of a GPU; None for a CPU."""
    return CudaStreams(device) if device.type == "cuda" else None
