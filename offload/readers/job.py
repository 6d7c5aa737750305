"""A transfer as a reader's threads see it: pieces to be read, and what has become of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Event
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
        waiting: pieces that nobody reads yet.
        reading: how many are being read.
    """

    def __init__(self, reader: Queues, pieces: Sequence[Piece], what: str) -> None:
        self.what = what
        self.waiting = deque(pieces)
        self.reading = 0
        self.failed: Exception | None = None
        self.seconds = 0.0
        self._reader = reader
        self._started: float | None = None
        self._ended = Event()

    @property
    def begun(self) -> bool:
        return self._started is not None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def begin(self) -> None:
        self.reading += 1
        if self._started is None:
            self._started = time.perf_counter()

    def fail(self, failure: Exception) -> None:
        self.failed = failure
        if not self.reading:
            self.finish()

    def finish(self) -> None:
        if self._started is not None:
            self.seconds = time.perf_counter() - self._started
        self._ended.set()

    def wait(self) -> float:
        start = time.perf_counter()
        if not self.done:
            self.hasten()
            if not self._ended.wait(self._reader.patience_s):
                raise OffloadError(
                    f"reading {self.what or 'weights'} took longer than {self._reader.patience_s:g}"
                    " s; the disk hangs or is overloaded"
                )
        if self.failed is not None:
            raise self.failed
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._reader.cancel(self)

    def hasten(self) -> None:
        self._reader.hasten(self)
