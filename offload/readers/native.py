"""Compiled threads that read with O_DIRECT, in the same order as `ThreadedReader`.

They never take Python's lock: a read begins when it is submitted, and the next one when it ends,
whatever the step loop is doing.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Sequence

from experts.safetensors_io import address_of
from kernels.cpu import NativeKernels
from kernels.cpu.streaming import CANCELLED, CHANGED, CLOSED, TRUNCATED, NativeReads, ReadJob
from offload.errors import OffloadError
from offload.readers.direct_io import DirectFiles
from offload.readers.pieces import (
    PIECE_BYTES,
    ReadPiece,
    cancelled,
    closed,
    cut,
    explain,
    timed_out,
)
from offload.readers.threads import IN_FLIGHT_BYTES, PATIENCE_S, THREADS
from offload.transfer import Read

INTERRUPT_POLL_S = 0.5
"""Seconds between returns of a wait inside compiled code to Python, to handle interrupts."""
_SUBMITTED = 64


class NativeReader:
    """See `offload.transfer.Reader`.

    Args:
        name: how it reads, in words.
        kernels: the compiled threads.
        files: files opened with O_DIRECT; closed with the reader.
        reason, bytes_per_second, threads, patience_s: see `ThreadedReader`.
    """

    def __init__(
        self,
        name: str,
        kernels: NativeKernels,
        files: DirectFiles,
        reason: str = "",
        bytes_per_second: float = 0.0,
        *,
        threads: int = THREADS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.patience_s = name, patience_s
        self.reason, self.bytes_per_second = reason, bytes_per_second
        self.reads, self.files = kernels.reads(IN_FLIGHT_BYTES), files
        self.reads.start(threads)
        # If the reader is never closed, its threads must end before the memory they write to goes.
        weakref.finalize(self, self.reads.close, INTERRUPT_POLL_S)
        self._submitted: list[NativeTransfer] = []  # kept until done: threads write to their places
        self._prune_at, self._closed = _SUBMITTED, False

    @property
    def throughput(self) -> float:
        return self.reads.throughput or self.bytes_per_second

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> NativeTransfer:
        transfer = NativeTransfer(self, reads, what, urgent)
        self._submitted.append(transfer)
        if len(self._submitted) > self._prune_at:
            self._submitted = [transfer for transfer in self._submitted if not transfer.done]
            self._prune_at = _SUBMITTED + 2 * len(self._submitted)
        self.reads.begin(transfer.record)
        return transfer

    def close(self) -> None:
        if not self._closed and self.reads.close(self.patience_s):
            self.files.close()
        self._closed = True


class NativeTransfer:
    """See `offload.transfer.Transfer`.

    Attributes:
        record: shared with the compiled threads.
    """

    __slots__ = ("_reader", "_reads", "_what", "record")

    def __init__(
        self, reader: NativeReader, reads: Sequence[Read], what: str, urgent: bool
    ) -> None:
        self._reader, self._reads, self._what = reader, reads, what
        if len(reads) == 1 and (size := reads[0].place.numel()) <= PIECE_BYTES:
            only = reads[0]  # the usual case, which needs no cutting
            numbers = [*self._request(only, only.offset, size), 1, only.place.data_ptr(), size]
            self.record = ReadJob(min(size, 1), numbers, urgent)
            return
        numbers, pieces = list[int](), cut(reads)
        for piece in pieces:
            numbers += (*self._request(piece, piece.offset, piece.nbytes), len(piece.views))
            for view in piece.views:
                numbers += (address_of(view), len(view))
        self.record = ReadJob(len(pieces), numbers, urgent)

    def _request(self, of: Read | ReadPiece, offset: int, nbytes: int) -> tuple[int, ...]:
        direct, status = self._reader.files.get(of.fd, of.status), of.status
        file = of.fd, -1 if direct is None else direct, offset, nbytes
        return (*file, -1, 0) if status is None else (*file, status.st_size, status.st_mtime_ns)

    @property
    def reads(self) -> NativeReads:
        """The threads that serve it."""
        return self._reader.reads

    @property
    def done(self) -> bool:
        return bool(self.record.done)

    @property
    def failed(self) -> Exception | None:
        return self._failure() if self.record.done and self.record.error else None

    def wait(self) -> float:
        start, record, reader = time.perf_counter(), self.record, self._reader
        if not record.done:
            self.hasten()
            while not reader.reads.wait(record, min(INTERRUPT_POLL_S, reader.patience_s)):
                if time.perf_counter() - start >= reader.patience_s:
                    raise timed_out(self._what, reader.patience_s)
        if record.refused:
            refusal = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            for fd in {read.fd for read in self._reads}:
                reader.files.refuse(fd, refusal)
        if record.error:
            raise self._failure()
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._reader.reads.cancel(self.record)

    def hasten(self) -> None:
        if not self.record.urgent:
            self._reader.reads.hasten(self.record)

    def _failure(self) -> OffloadError:
        error = self.record.error
        if error in (CANCELLED, CLOSED):
            return (cancelled if error == CANCELLED else closed)(self._what)
        piece = cut(self._reads)[self.record.failed]
        if error == CHANGED:
            return explain(piece.changed(), piece, self._what)
        if error == TRUNCATED:
            return explain(piece.truncated(), piece, self._what)
        return explain(OSError(error, os.strerror(error)), piece, self._what)
