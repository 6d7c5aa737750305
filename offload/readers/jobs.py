"""A transfer as a reader's threads see it: pieces to be read, and what has become of them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

from offload.errors import OffloadError
from offload.transfer import Read

# ---- Cuts what is to be read into requests of a good size.
#
# Neighbours in a file become one scattering request (an expert's scales and planes lie one after
# the other in a store and go to different arrays); very long ones are cut, so that several
# threads share them and an urgent read never waits for more than a piece.

PIECE_BYTES = 4 << 20
"""An expert is one request if it can be: systems cut long ones themselves and keep the disk busy
with the parts, at a fraction of the processor's time that as many requests and wake-ups take."""


@dataclass
class Piece:
    """``nbytes`` of a file from ``offset`` on, scattered into ``views``."""

    fd: int
    path: Path
    offset: int
    status: os.stat_result | None
    views: list[memoryview] = field(default_factory=list)
    nbytes: int = 0

    def check_unchanged(self) -> None:
        """Raise `OffloadError` where the file was rewritten since it was opened."""
        if self.status is None:
            return
        now, before = os.fstat(self.fd), self.status
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise self.changed()

    def changed(self) -> OffloadError:
        """The file was rewritten since it was opened."""
        assert self.status is not None
        return OffloadError(
            f"{self.path} was changed while it was in use ({self.status.st_size} bytes when it was "
            f"opened, {os.fstat(self.fd).st_size} now); put the file back and load the model again"
        )

    def truncated(self) -> OffloadError:
        """The file ends before it does."""
        return OffloadError(
            f"{self.path} is truncated: {os.fstat(self.fd).st_size} bytes, needed up to byte "
            f"{self.offset + self.nbytes}; copy or convert the model again"
        )


def cut(reads: Sequence[Read]) -> list[Piece]:
    """Pieces of at most `PIECE_BYTES`, in the order of the reads."""
    pieces: list[Piece] = []
    for read in reads:
        rest = memoryview(read.place.numpy())  # type: ignore[arg-type]
        offset = read.offset
        while rest:
            piece = pieces[-1] if pieces else None
            if (
                piece is None
                or piece.fd != read.fd
                or piece.offset + piece.nbytes != offset
                or piece.nbytes == PIECE_BYTES
            ):
                piece = Piece(read.fd, read.path, offset, read.status)
                pieces.append(piece)
            taken = min(PIECE_BYTES - piece.nbytes, len(rest))
            piece.views.append(rest[:taken])
            piece.nbytes += taken
            offset += taken
            rest = rest[taken:]
    return pieces


def explain(error: Exception, piece: Piece, what: str) -> OffloadError:
    """What a user can do something with."""
    whose = f" ({what})" if what else ""
    if isinstance(error, OffloadError):
        return OffloadError(f"{error}{whose}")
    reason = getattr(error, "strerror", None) or str(error)
    text = (
        f"cannot read {piece.nbytes} bytes at byte {piece.offset} of {piece.path}{whose}: {reason};"
        " check the disk and its cables or network, then run the request again"
    )
    failure = OffloadError(text)
    failure.__cause__ = error
    return failure


# ----


class Queues(Protocol):
    """The reader, as far as its jobs need it."""

    patience_s: float

    def cancel(self, job: Job) -> bool: ...
    def hasten(self, job: Job) -> None: ...


class Job:
    """See `offload.transfer.Transfer`; its fields are changed under the reader's lock only.

    Attributes:
        urgent: somebody waits for it.
        begun: some of it has been read, or is being read.
        waiting: pieces that nobody reads yet.
        reading: how many are being read.
    """

    def __init__(self, reader: Queues, pieces: Sequence[Piece], what: str, urgent: bool) -> None:
        self.what, self.urgent, self.done = what, urgent, False
        self.waiting = deque(pieces)
        self.reading = 0
        self.failed: Exception | None = None
        self.begun = False
        self._reader = reader
        self._ended = Lock()  # held until then: an Event takes ten times as long
        self._ended.acquire()

    def begin(self) -> None:
        self.reading += 1
        self.begun = True

    def fail(self, failure: Exception) -> None:
        self.failed = failure
        if not self.reading:
            self.finish()

    def finish(self) -> None:
        self.done = True
        self._ended.release()

    def wait(self) -> float:
        start = time.perf_counter()
        if not self.done:
            self.hasten()
            if not self._ended.acquire(timeout=self._reader.patience_s):
                raise hangs(self.what, self._reader.patience_s)
            self._ended.release()
        if self.failed is not None:
            raise self.failed
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._reader.cancel(self)

    def hasten(self) -> None:
        if not self.urgent:
            self._reader.hasten(self)


def cancelled(what: str) -> OffloadError:
    """Nobody wants it any more."""
    return OffloadError(f"the read of {what or 'weights'} was cancelled")


def closed(what: str) -> OffloadError:
    """It was asked for, or had not begun, when its reader was closed."""
    return OffloadError(f"cannot read {what or 'weights'}: the reader was closed")


def hangs(what: str, patience_s: float) -> OffloadError:
    """It did not end within so many seconds."""
    return OffloadError(
        f"reading {what or 'weights'} took longer than {patience_s:g} s; the disk hangs or is "
        "overloaded"
    )


# ---- How much is being read, and how fast reading has been of late.

REMEMBERED_S = 1.0
"""Of reading; what was before counts less and less."""


class Meter:
    """Whoever calls it holds the reader's lock.

    Attributes:
        in_flight: bytes that are being read.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._since = self._busy_seconds = 0.0
        self._bytes = 0

    @property
    def throughput(self) -> float:
        """Bytes a second while anything is being read; 0 before anything has been."""
        return self._bytes / self._busy_seconds if self._bytes else 0.0

    def begin(self, nbytes: int) -> None:
        if self.in_flight == 0:
            self._since = time.perf_counter()
        self.in_flight += nbytes

    def end(self, nbytes: int) -> None:
        now = time.perf_counter()
        self.in_flight -= nbytes
        self._busy_seconds += now - self._since
        self._bytes += nbytes
        self._since = now
        if self._busy_seconds > 2 * REMEMBERED_S:
            self._busy_seconds, self._bytes = self._busy_seconds / 2, self._bytes // 2
