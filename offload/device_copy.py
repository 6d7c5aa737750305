"""Copies from main memory to a GPU, beside its computing: a stream of their own, in batches.

What is asked for is collected, and the first who waits starts all of it with one call: a layer's
misses become one batch, not a Python loop of launches. A copy begins when its source is complete
and when the kernels launched before it, which may read the old bytes of its target, are done.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.transfer import Transfer


class DeviceCopier:
    """Copies to one device; belongs to the thread that launches its kernels.

    Args:
        device: a GPU; on the CPU, where there is no stream, copies are done when they are started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._collected: list[DeviceCopy] = []

    def copy(self, source: Tensor, target: Tensor, after: Transfer | None = None) -> DeviceCopy:
        """Bytes of ``source``, pinned so that the copy is asynchronous, into ``target``.

        Args:
            source: stays as it is until the copy is `done`.
            target: as many bytes on the device.
            after: brings the source; None where it is there.
        """
        copy = DeviceCopy(self, source, target, after)
        self._collected.append(copy)
        return copy

    def start(self) -> None:
        """Start everything whose source is complete, in one call."""
        ready = [copy for copy in self._collected if copy.after is None or copy.after.done]
        if not ready:
            return
        self._collected = [copy for copy in self._collected if copy not in ready]
        batch = [copy for copy in ready if copy.after is None or copy.after.failed is None]
        ended = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            ended = torch.cuda.Event()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if batch:
                targets, sources = [c.target for c in batch], [c.source for c in batch]
                torch._foreach_copy_(targets, sources, non_blocking=True)
            if ended is not None:
                ended.record(self._stream)
        for copy in ready:
            copy.begin(ended)

    def withdraw(self, copy: DeviceCopy) -> bool:
        """Whether it had not been started, and now never will."""
        if copy not in self._collected or (copy.after is not None and not copy.after.cancel()):
            return False
        self._collected.remove(copy)
        return True


class DeviceCopy:
    """See `offload.transfer.Transfer`. Waiting for it holds up the device's current stream, not the
    caller, unless its source is still on its way."""

    def __init__(
        self, copier: DeviceCopier, source: Tensor, target: Tensor, after: Transfer | None
    ) -> None:
        self.source, self.target, self.after = source, target, after
        self.seconds = 0.0
        self.failed: Exception | None = None
        self._copier = copier
        self._begun, self._over = False, False
        self._ended: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        if not self._begun:
            self._copier.start()
        if self._begun and not self._over:
            self._over = self._ended is None or self._ended.query()
        return self._over

    def begin(self, ended: torch.cuda.Event | None) -> None:
        """The copier has launched it; ``ended`` comes when its bytes have."""
        self._begun, self._ended = True, ended
        if self.after is not None:
            self.seconds, self.failed = self.after.seconds, self.after.failed

    def wait(self) -> float:
        start = time.perf_counter()
        if not self._begun and self.failed is None:
            if self.after is not None:
                self.after.wait()
            self._copier.start()
        if self.failed is not None:
            raise self.failed
        if self._ended is not None:
            torch.cuda.current_stream(self.target.device).wait_event(self._ended)
        return time.perf_counter() - start

    def cancel(self) -> bool:
        if self._begun or not self._copier.withdraw(self):
            return False
        self.failed, self._over = OffloadError("the copy was cancelled"), True
        return True

    def hasten(self) -> None:
        if self.after is not None:
            self.after.hasten()
