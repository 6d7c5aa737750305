"""Bytes on their way: what is asked of a file, and the handle of an answer that is still coming.

A `Reader` (offload.readers) serves urgent transfers before all others, so that a prefetch never
stands in front of a layer that waits. Whoever asks keeps the place alive and leaves it alone until
the transfer is `done`, even after `wait` has given up on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor


class Read(NamedTuple):
    """Bytes of an open file, and where they go.

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
    """Some bytes that belong together: all of them arrive, or the transfer has failed."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not: nobody touches its places any more."""
        ...

    @property
    def failed(self) -> Exception | None:
        """Why it ended badly, if it did."""
        ...

    def wait(self) -> float:
        """Block until the bytes are there; returns the seconds waited.

        Raises:
            OffloadError: they cannot be had, or did not come in time.
        """
        ...

    def cancel(self) -> bool:
        """Whether it had not begun, and now never will."""
        ...

    def hasten(self) -> None:
        """Somebody waits for it now: serve it with the urgent ones."""
        ...


class Reader(Protocol):
    """Reads files in the background.

    Attributes:
        reason: why it was chosen, with figures.
        bytes_per_second: what it read of the model's own files when it was tried; 0 before.
    """

    reason: str
    bytes_per_second: float

    @property
    def name(self) -> str:
        """How it reads, in words."""
        ...

    @property
    def throughput(self) -> float:
        """Bytes a second while anything is read, of late; as measured at the start before."""
        ...

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> Transfer:
        """Begin as soon as possible, urgent ones first.

        Args:
            reads: filled all or in vain; neighbours in a file become one request.
            urgent: somebody waits for it.
            what: what the bytes are, for messages ("expert 5 of layer 3").
        """
        ...

    def close(self) -> None:
        """What has not begun fails, what has begun ends; threads and files are given back."""
        ...
