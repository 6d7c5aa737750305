"""Read bytes of a file into memory past the page cache, with O_DIRECT.

The page cache would be a memory tier of unknown size: a plan that counts bytes must not fill memory
that it does not count. O_DIRECT needs addresses, offsets and lengths on block boundaries; other
reads go through a small aligned buffer.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from experts.safetensors_io import address_of
from offload.readers.pieces import PIECE_BYTES

ALIGNMENT = 4096  # the largest block size in use, and a page
BOUNCE_BYTES = PIECE_BYTES + 2 * ALIGNMENT

Views = Sequence[memoryview]
Status = os.stat_result | None

logger = logging.getLogger(__name__)


class ReadBackend(Protocol):
    """Reads for one thread of a reader; each thread has its own."""

    def read(self, fd: int, offset: int, views: Views, status: Status = None) -> int:
        """Fill the views from ``offset`` on, at most `PIECE_BYTES`.

        Args:
            status: of the file, if known: asking takes a quarter as long as reading.

        Returns:
            The bytes read, fewer than requested only where the file ends.

        Raises:
            OSError: the system's own.
        """
        ...


class DirectFiles:
    """Files opened a second time, with O_DIRECT; shared by a reader's threads."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], int] = {}
        self._without: set[tuple[int, int]] = set()
        self._lock = Lock()

    def get(self, fd: int, status: Status = None) -> int | None:
        """A descriptor of the same file with O_DIRECT; None if its file system has none."""
        status = os.fstat(fd) if status is None else status
        key = status.st_dev, status.st_ino
        with self._lock:
            if key not in self._files and key not in self._without:
                try:  # by way of /proc: the file that was checked, even if it was renamed
                    self._files[key] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
                except OSError as error:
                    self._refuse(key, error)
            return None if key in self._without else self._files[key]

    def refuse(self, fd: int, why: OSError) -> None:
        """Return None from now on for a file that opens with O_DIRECT but does not read with it."""
        status = os.fstat(fd)
        with self._lock:
            self._refuse((status.st_dev, status.st_ino), why)

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def _refuse(self, key: tuple[int, int], why: OSError) -> None:
        if key not in self._without:
            self._without.add(key)
            logger.warning("no O_DIRECT here (%s): reads go through the page cache", why.strerror)


class DirectReads:
    """A `ReadBackend` with O_DIRECT; `BufferedReads` for files that refuse it."""

    def __init__(self, files: DirectFiles) -> None:
        self._files = files
        self._buffered = BufferedReads()
        self._bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))

    def read(self, fd: int, offset: int, views: Views, status: Status = None) -> int:
        direct = self._files.get(fd, status)
        if direct is None:
            return self._buffered.read(fd, offset, views)
        done = 0
        try:
            while rest := remaining(views, done):
                got = self._read_once(direct, offset + done, rest)
                if got <= 0:
                    break
                done += got
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files.refuse(fd, error)
            return self._buffered.read(fd, offset, views)
        return done

    def _read_once(self, direct: int, offset: int, views: list[memoryview]) -> int:
        if offset % ALIGNMENT == 0 and all(map(_is_aligned, views)):
            return os.preadv(direct, views, offset)
        start, size = round_down(offset), sum(map(len, views))
        end = min(start + BOUNCE_BYTES, round_up(offset + size))
        got = os.preadv(direct, [self._bounce[: end - start]], start)
        return scatter(self._bounce[offset - start : max(got, offset - start)], views)


class BufferedReads:
    """A `ReadBackend` through the page cache, which is told to drop the bytes at once."""

    def read(self, fd: int, offset: int, views: Views, status: Status = None) -> int:
        done = 0
        while rest := remaining(views, done):
            got = os.preadv(fd, rest, offset + done)
            if got == 0:
                break
            done += got
        start, end = round_down(offset), round_up(offset + done)
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        return done


def remaining(views: Views, done: int) -> list[memoryview]:
    """The views without their first ``done`` bytes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest


def scatter(source: memoryview, views: Views) -> int:
    """Copy into the views one after the other; returns the bytes copied."""
    done = 0
    for view in views:
        part = source[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done


def round_down(offset: int) -> int:
    return offset // ALIGNMENT * ALIGNMENT


def round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _is_aligned(view: memoryview) -> bool:
    return address_of(view) % ALIGNMENT == 0 and len(view) % ALIGNMENT == 0
