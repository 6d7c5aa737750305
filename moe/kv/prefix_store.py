"""Keys and values of prompts on disk (`memory.prefix_dir`), for other runs and other servers.

A file holds a block of 64 tokens of every layer (`moe.kv.block_codec`) and is named by the hash of
everything up to its end, so that prefixes share the files of what they have in common, and an
existing file needs no writing. The folder of a file stands for everything that its bits depend on:
model, code, settings, processor (`moe.loading.prefix_key`); salts are part of the hashes. Blocks
are written behind the requests, when the prefix cache evicts them and at the end of a run, and read
behind the requests, when a prompt begins with them.

A file gets its name when it is complete, and is checked when it is read: what is damaged, of
another layout, or no plain file is deleted, with a warning in the log. Links are not followed, and
what has other names is left alone. Several processes may share a directory, whose files may go at
any time. A disk that is full ends the saving, not the serving. The directory is its owner's alone
(mode 0700): the files hold what users have written.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock
from uuid import uuid4

from kernels.cpu.kv import BLOCK
from moe.errors import ProfileError
from moe.kv.block_codec import BlockError, decode_block, encode_block
from moe.kv.cache import KVCache
from moe.kv.layout import StoredBlock

_SUFFIX, _UNFINISHED = ".kv", ".unfinished"
_PENDING_BYTES = 256 * 2**20
_MOST_BYTES = _PENDING_BYTES  # of a file
_LOOKS = 16  # how often the directory is looked at while as much is written as it may hold
_STALE_S = 600.0  # no file is being written for so long
_logger = logging.getLogger("moe")


def prepare_directory(path: Path) -> None:
    """Make `memory.prefix_dir`, or check it. Raises `ProfileError`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ProfileError(f"memory.prefix_dir: {path} cannot be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ProfileError(
            f"memory.prefix_dir: {path} must belong to this user alone (mode 0700); it has mode "
            f"{found.st_mode & 0o7777:04o} and belongs to user {found.st_uid}. Set it with "
            "chmod 700, or name a directory that does not exist yet"
        )


class PrefixStore:
    """Blocks of prompts in a directory.

    Args:
        directory: as `prepare_directory` leaves it.
        key: see `moe.loading.prefix_key.prefix_key`.
        most_bytes: of all files in the directory; the least recently used are deleted.

    Attributes:
        saved_blocks: written so far.
        dropped_files: that were deleted because they were damaged or not ours.
    """

    def __init__(self, directory: Path, key: str, most_bytes: int) -> None:
        self._root, self._directory = directory, directory / key
        self._most_bytes = most_bytes
        self.saved_blocks = self.dropped_files = 0
        self._pending = self._bytes = self._new_bytes = 0
        self._stopped = False
        self._lock = Lock()  # of `_pending`
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="moe-prefixes")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="moe-prefix-reads")
        for pool in (self._writer, self._reader):
            pool.submit(int)  # starts its thread: steps must not fail where there is none
        try:
            self._make_directory()
            self._trim()
        except OSError as error:
            self._stop(error)

    def save(
        self, kv: KVCache, digests: Sequence[bytes], ids: Sequence[int], *, wait: bool = False
    ) -> None:
        """Write the whole blocks of a sequence that are not on disk.

        Args:
            digests: of everything up to the end of each block.
            ids: the tokens.
            wait: write all of them now; else behind the requests, and not what would have to wait
                for long.
        """
        if not kv.can_be_stored:
            return
        now, size = time.time_ns(), BLOCK * kv.token_bytes
        for at, digest in enumerate(digests[: kv.length // BLOCK]):
            path = self._path(digest)
            if self._stopped or (not wait and self._pending + size > _PENDING_BYTES):
                return
            if path.exists():
                continue
            tokens = list(ids[at * BLOCK : (at + 1) * BLOCK])
            # Of one prompt the last block is the oldest, so that it goes first.
            write = partial(self._write, path, tokens, kv.stored_block(at), now - 1000 * at)
            if wait:  # at the end of a program, when threads can be given nothing more
                write()
                continue
            with self._lock:
                self._pending += size
            self._writer.submit(write).add_done_callback(partial(self._written, size))

    def refuse(self, digest: bytes) -> None:
        """Delete a block that does not go on from what is before it."""
        self._drop(self._path(digest), "has another layout, or rows that are no numbers,")

    def num_stored(self, digests: Sequence[bytes]) -> int:
        """Return how many of these blocks are on disk, up to the first that is not."""
        return sum(1 for _ in takewhile(lambda digest: self._path(digest).exists(), digests))

    def read(self, digests: Sequence[bytes], ids: Sequence[int]) -> Future[list[StoredBlock]]:
        """Begin to read blocks behind the requests; the result ends before the first that cannot be
        used.

        Args:
            digests: see `save`.
            ids: the tokens of these blocks.
        """
        return self._reader.submit(self._read_all, list(digests), list(ids))

    def finish(self) -> None:
        """Wait for what is being written behind the requests; read no more."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _path(self, digest: bytes) -> Path:
        return self._directory / f"{digest.hex()}{_SUFFIX}"

    def _make_directory(self) -> None:
        """Make the folder of this model. Raises OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{self._directory} is a link")

    def _write(self, path: Path, ids: list[int], block: StoredBlock, used: int) -> None:
        """Write a file that was last used at this time, in ns."""
        if self._stopped:
            return
        unfinished = path.with_name(f"{uuid4().hex}{_UNFINISHED}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(unfinished, flags, 0o600), "wb") as file:
                file.writelines(encode_block(block, ids))
            os.utime(unfinished, ns=(used, used))
            unfinished.rename(path)
            self.saved_blocks += 1
            size = path.stat().st_size
            self._bytes += size
            self._new_bytes += size
            # Others write, too, so that the sum is looked up again long before it is reached
            if self._bytes > self._most_bytes or self._new_bytes > self._most_bytes // _LOOKS:
                self._trim()
        except FileNotFoundError:  # somebody deletes: this block is not saved
            try:
                self._make_directory()
            except OSError as error:
                self._stop(error)
        except OSError as error:
            self._stop(error)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _written(self, size: int, _: Future[None]) -> None:
        with self._lock:
            self._pending -= size

    def _read_all(self, digests: list[bytes], ids: list[int]) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        now = time.time_ns()
        for at, digest in enumerate(digests):
            path = self._path(digest)
            block = self._read(path, ids[at * BLOCK : (at + 1) * BLOCK])
            if block is None:
                break
            found.append(block)
            with suppress(OSError):  # another process has deleted it
                os.utime(path, ns=(now - 1000 * at, now - 1000 * at))
        return found

    def _read(self, path: Path, ids: list[int]) -> StoredBlock | None:
        """A file's block; None if there is none that can be used."""
        try:
            return decode_block(_plain_bytes(path), ids)
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.warning("a saved prefix cannot be read: %s: %s", path, error.strerror)
            return None
        except BlockError as error:
            self._drop(path, str(error))
            return None

    def _drop(self, path: Path, why: str) -> None:
        self.dropped_files += 1
        _logger.warning("a saved prefix %s and is deleted: %s", why, path)
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _stop(self, error: OSError) -> None:
        if not self._stopped:
            _logger.warning(
                "memory.prefix_dir: no more prefixes are saved to %s: %s",
                self._root, error.strerror,
            )  # fmt: skip
        self._stopped = True

    def _trim(self) -> None:
        """Delete the least recently used files beyond the limit, and what killed processes left."""
        files = []
        for path in _files_below(self._root):
            with suppress(FileNotFoundError):  # another process deletes, too
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    continue
                if path.suffix == _UNFINISHED and time.time() - found.st_mtime > _STALE_S:
                    self._drop(path, "was never finished")
                elif path.suffix == _SUFFIX:
                    files.append((found.st_mtime_ns, found.st_size, path))
        self._bytes, self._new_bytes = sum(size for _, size, _ in files), 0
        if self._bytes <= self._most_bytes:
            return
        for _, size, path in sorted(files):
            path.unlink(missing_ok=True)
            self._bytes -= size
            if self._bytes <= self._most_bytes * 9 // 10:
                return


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files in the folders of a directory, but not behind links."""
    for folder in root.iterdir():
        if folder.is_dir() and not folder.is_symlink():
            with suppress(FileNotFoundError):
                yield from folder.iterdir()


def _plain_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, or `BlockError` for what is none of ours."""
    try:
        # O_NONBLOCK: a pipe is refused, not waited for
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise BlockError("is no plain file") from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise BlockError("is no plain file")
    with open(fd, "rb") as file:
        if found.st_size > _MOST_BYTES:
            raise BlockError(f"has more than {_MOST_BYTES} bytes")
        return file.read(found.st_size)
