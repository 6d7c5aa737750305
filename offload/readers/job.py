"""A transfer as a reader's threads see it: pieces to be read, and what has become of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from offload.errors import OffloadError
from offload.readers.pieces import Piece


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
