"""Files from untrusted places, opened with care: plain files only, and of a bounded size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_SMALL_BYTES = 64 << 20
MAX_DIMENSION = 1 << 48  # beyond any memory; keeps products of sizes inside torch's int64

LFS_POINTER = b"version https://git-lfs"
"""The beginning of what a clone without Git LFS has in place of a large file."""
LFS_REFUSAL = "is a pointer of Git LFS, not the file; run git lfs pull where it was cloned"


class HeaderError(Exception):
    """Why a file is refused; the caller adds which file it is."""


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a plain file for reading. Raises `OSError`, or `HeaderError` for anything else."""
    # O_NONBLOCK: a FIFO must be refused, not waited for
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise HeaderError("is not a regular file")
    return fd, status


def read_small(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """A file of settings or the like: a plain file of at most ``most`` bytes. Raises `OSError`."""
    try:
        fd, status = open_regular(path)
    except HeaderError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with open(fd, "rb") as file:
        content = file.read(most + 1) if status.st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return content
