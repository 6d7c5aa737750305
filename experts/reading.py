"""Bytes of a file straight to where they stay, as fast as the disk gives them.

What the page cache has is copied from there. The rest goes past it (O_DIRECT), with no copy and no
pages made for one that nobody reads again: half of a buffered read's time on a fast disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from experts.safetensors_io import OpenFile, pread_exactly

BLOCK = 4096
"""Addresses, offsets and lengths of reads past the page cache are multiples of it."""

_HUGE_PAGE = 2 << 20
_ONLY_CACHED: int = getattr(os, "RWF_NOWAIT", 0)


def fresh_bytes(nbytes: int) -> Tensor:
    """``(nbytes,)`` uint8; from 2 MiB on it begins at a page, of huge pages where there are any."""
    if nbytes < _HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class FileReader:
    """Reads an open file, which stays the caller's; a context manager. Threads may share it."""

    def __init__(self, file: OpenFile) -> None:
        self._fd = file.fd
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without it
                # by way of /proc: the file that was checked, whatever bears its name now
                self._direct = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT)

    def read(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`; returns the bytes read, fewer only where the file ends.

        Raises OSError.
        """
        done = self._cached(view, offset)
        done += self._uncached(view[done:], offset + done)
        return done + pread_exactly(self._fd, view[done:], offset + done)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _cached(self, view: memoryview, offset: int) -> int:
        """What comes first of those bytes and is in the page cache."""
        if self._direct is None or not _ONLY_CACHED or not view:
            return 0
        try:
            return os.preadv(self._fd, [view], offset, _ONLY_CACHED)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            return 0

    def _uncached(self, view: memoryview, offset: int) -> int:
        """Whole blocks past the page cache, where place and offset are at blocks, too."""
        done, size = 0, len(view) // BLOCK * BLOCK
        if self._direct is None or not size or offset % BLOCK or address_of(view) % BLOCK:
            return 0
        while done < size:
            try:
                got = os.preadv(self._direct, [view[done:size]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:  # other blocks than these
                    raise
                break
            done += got
            if not got or got % BLOCK:  # the end of the file
                break
        return done


def address_of(view: memoryview) -> int:
    """Of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
