"""Ways to get bytes of a file into memory past the page cache.

The page cache would be a tier that nobody sized: a plan that counts bytes must not fill memory
behind its own back. O_DIRECT wants addresses, offsets and lengths on block boundaries; what is not
goes through a small aligned buffer.
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
from offload.readers.jobs import PIECE_BYTES

ALIGNMENT = 4096  # the largest block size in use, and a page
BOUNCE_BYTES = PIECE_BYTES + 2 * ALIGNMENT

logger = logging.getLogger(__name__)


class Way(Protocol):
    """How one thread of a reader reads; each thread has its own."""

    def read(
        self,
        fd: int,
        offset: int,
        views: Sequence[memoryview],
        status: os.stat_result | None = None,
    ) -> int:
        """Fill the views from ``offset`` on, at most `PIECE_BYTES`.

        Args:
            status: of the file, where somebody knows it: asking takes a quarter as long as reading.

        Returns:
            The bytes read, fewer than asked for only where the file ends.

        Raises:
            OSError: the system's own.
        """
        ...


class Buffered:
    """Through the page cache, which is told to forget them at once."""

    def read(
        self,
        fd: int,
        offset: int,
        views: Sequence[memoryview],
        status: os.stat_result | None = None,
    ) -> int:
        done = 0
        while rest := remaining(views, done):
            got = os.preadv(fd, rest, offset + done)
            if got == 0:
                break
            done += got
        start, end = round_down(offset), round_up(offset + done)
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        return done


class DirectFiles:
    """Files opened once more with O_DIRECT; shared by a reader's threads."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], int] = {}
        self._without: set[tuple[int, int]] = set()
        self._lock = Lock()

    def get(self, fd: int, status: os.stat_result | None = None) -> int | None:
        """A descriptor with O_DIRECT of the same file, by its number or what is known of it; None
        where there can be none."""
        status = os.fstat(fd) if status is None else status
        key = status.st_dev, status.st_ino
        with self._lock:
            if key not in self._files and key not in self._without:
                try:  # by way of /proc: the file that was checked, whatever bears its name now
                    self._files[key] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
                except OSError as error:
                    self._refuse(key, error)
            return None if key in self._without else self._files[key]

    def refuse(self, fd: int, why: OSError) -> None:
        """From now on None for this file, which took O_DIRECT and then did not read with it."""
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


class Direct:
    """O_DIRECT, through a buffer where something is not aligned, `Buffered` where it is refused."""

    def __init__(self, files: DirectFiles) -> None:
        self._files = files
        self._buffered = Buffered()
        self._bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))

    def read(
        self,
        fd: int,
        offset: int,
        views: Sequence[memoryview],
        status: os.stat_result | None = None,
    ) -> int:
        direct = self._files.get(fd, status)
        if direct is None:
            return self._buffered.read(fd, offset, views)
        done = 0
        try:
            while rest := remaining(views, done):
                got = self._some(direct, offset + done, rest)
                if got <= 0:
                    break
                done += got
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files.refuse(fd, error)
            return self._buffered.read(fd, offset, views)
        return done

    def _some(self, direct: int, offset: int, views: list[memoryview]) -> int:
        if offset % ALIGNMENT == 0 and all(map(is_aligned, views)):
            return os.preadv(direct, views, offset)
        start, size = round_down(offset), sum(map(len, views))
        end = min(start + BOUNCE_BYTES, round_up(offset + size))
        got = os.preadv(direct, [self._bounce[: end - start]], start)
        return scatter(self._bounce[offset - start : max(got, offset - start)], views)


def remaining(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The views without their first ``done`` bytes."""
    if not done:
        return list(views)
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest


def first(views: Sequence[memoryview], most: int) -> list[memoryview]:
    """The views' first ``most`` bytes."""
    taken = []
    for view in views:
        taken.append(view[:most])
        most -= len(taken[-1])
        if most == 0:
            break
    return taken


def scatter(source: memoryview, views: Sequence[memoryview]) -> int:
    """Copy into the views one after the other; returns the bytes copied."""
    done = 0
    for view in views:
        part = source[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done


def is_aligned(view: memoryview) -> bool:
    return address_of(view) % ALIGNMENT == 0 and len(view) % ALIGNMENT == 0


def round_down(offset: int) -> int:
    return offset // ALIGNMENT * ALIGNMENT


def round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
