"""Reads of a file as the cache sees them: the request, the reader, and the transfer under way.

A `Reader` (offload/readers) serves urgent transfers before all others, so a prefetch never delays
a layer that waits. The caller keeps the place of a read alive and leaves it alone until the
transfer is `done`, even after `wait` has given up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor


class Read(NamedTuple):
    """Bytes of an open file, and the memory to read them into.

    Attributes:
        fd: open for reading; stays open until the transfer is done.
        path: its name, for messages.
        offset: of the first byte.
        place: 1-D contiguous uint8 CPU tensor; all of it is filled.
        status: of the file when it was opened; a file rewritten since then is an error.
    """

    fd: int
    path: Path
    offset: int
    place: Tensor
    status: os.stat_result | None = None


class Transfer(Protocol):
    """Reads that belong together: all of their bytes arrive, or the transfer has failed."""

    @property
    def done(self) -> bool:
        """Return whether it has ended, well or not; its memory is not written to any more."""
        ...

    @property
    def failed(self) -> Exception | None:
        """Why it failed, if it did."""
        ...

    def wait(self) -> float:
        """Block until the bytes are there; returns the seconds waited.

        Raises:
            OffloadError: they cannot be read, or did not come in time.
        """
        ...

    def cancel(self) -> bool:
        """Cancel it if it has not begun; returns whether it was cancelled."""
        ...

    def hasten(self) -> None:
        """Make it urgent: a layer waits for it now."""
        ...


class Reader(Protocol):
    """Reads files in the background.

    Attributes:
        reason: why it was chosen, with figures.
        bytes_per_second: measured on the model's own files by `choose_reader`; 0 before.
    """

    reason: str
    bytes_per_second: float

    @property
    def name(self) -> str:
        """Its way of reading, in words."""
        ...

    @property
    def throughput(self) -> float:
        """Recent bytes per second of reading; before the first read, `bytes_per_second`."""
        ...

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> Transfer:
        """Begin to read as soon as possible, urgent reads first.

        Args:
            reads: all are filled, or the transfer fails; neighbours in a file become one request.
            urgent: a layer waits for it.
            what: what the bytes are, for messages ("expert 5 of layer 3").
        """
        ...

    def close(self) -> None:
        """Fail what has not begun, wait for what has; end threads and close files."""
        ...
