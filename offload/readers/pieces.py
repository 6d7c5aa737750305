"""Cut reads into requests of a good size, and say in plain words why one failed.

Reads that are neighbours in a file become one scattering request: an expert's scales and planes lie
one after the other in a store and go to different arrays. Very long reads are cut, so that several
threads share them and an urgent read never waits for more than one piece.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offload.errors import OffloadError
from offload.transfer import Read

PIECE_BYTES = 4 << 20
"""An expert is one request if possible: the system splits long requests itself and keeps the disk
busy with the parts, at a fraction of the CPU time of as many requests and wake-ups."""


@dataclass
class ReadPiece:
    """``nbytes`` of a file from ``offset`` on, scattered into ``views``."""

    fd: int
    path: Path
    offset: int
    status: os.stat_result | None
    views: list[memoryview] = field(default_factory=list)
    nbytes: int = 0

    def check_unchanged(self) -> None:
        """Raise `OffloadError` if the file was rewritten since it was opened."""
        if self.status is not None:
            now, before = os.fstat(self.fd), self.status
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise self.changed()

    def changed(self) -> OffloadError:
        """The error for a file that was rewritten since it was opened."""
        assert self.status is not None
        return OffloadError(
            f"{self.path} was changed while it was in use ({self.status.st_size} bytes when it was "
            f"opened, {os.fstat(self.fd).st_size} now); put the file back and load the model again"
        )

    def truncated(self) -> OffloadError:
        """The error for a file that ends before this piece does."""
        return OffloadError(
            f"{self.path} is truncated: {os.fstat(self.fd).st_size} bytes, needed up to byte "
            f"{self.offset + self.nbytes}; copy or convert the model again"
        )


def cut(reads: Sequence[Read]) -> list[ReadPiece]:
    """Pieces of at most `PIECE_BYTES`, in the order of the reads."""
    pieces: list[ReadPiece] = []
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
                piece = ReadPiece(read.fd, read.path, offset, read.status)
                pieces.append(piece)
            taken = min(PIECE_BYTES - piece.nbytes, len(rest))
            piece.views.append(rest[:taken])
            piece.nbytes += taken
            offset += taken
            rest = rest[taken:]
    return pieces


def explain(error: Exception, piece: ReadPiece, what: str) -> OffloadError:
    """The error to report for a failed piece of ``what``, with advice."""
    suffix = f" ({what})" if what else ""
    if isinstance(error, OffloadError):
        return OffloadError(f"{error}{suffix}")
    reason = getattr(error, "strerror", None) or str(error)
    failure = OffloadError(
        f"cannot read {piece.nbytes} bytes at byte {piece.offset} of {piece.path}{suffix}: "
        f"{reason}; check the disk and its cables or network, then run the request again"
    )
    failure.__cause__ = error
    return failure


def cancelled(what: str) -> OffloadError:
    """The error of a cancelled read."""
    return OffloadError(f"the read of {what or 'weights'} was cancelled")


def closed(what: str) -> OffloadError:
    """The error of a read that had not begun when its reader was closed."""
    return OffloadError(f"cannot read {what or 'weights'}: the reader was closed")


def timed_out(what: str, patience_s: float) -> OffloadError:
    """The error of a read that takes longer than ``patience_s``."""
    return OffloadError(
        f"reading {what or 'weights'} took longer than {patience_s:g} s; the disk hangs or is "
        "overloaded"
    )
