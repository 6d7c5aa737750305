"""How much is being read, and how fast reading has been of late."""

from __future__ import annotations

import time

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
