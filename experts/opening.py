"""Opens a safetensors file of a directory that nobody vouches for.

File names come from the same place as the weights, so they are treated as hostile: absolute paths,
`..` and links that leave the directory are refused. The one link that may leave it is the hub
cache's own ``snapshots/<revision>/x -> blobs/<hash>``. A file that is opened stays open, so one
that is replaced meanwhile does not mix with what was checked.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from experts.header import HeaderError, TensorInfo, read_header


@dataclass(frozen=True)
class OpenFile:
    """An open file of tensors, checked; whoever opens it closes `fd`."""

    path: Path
    fd: int
    status: os.stat_result
    tensors: dict[str, TensorInfo]

    @property
    def unchanged(self) -> bool:
        """Whether nobody has rewritten it in place since it was opened."""
        now = os.fstat(self.fd)
        before = self.status
        return (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def contained(directory: Path, name: str) -> Path:
    """The real path of `name`, refused outside `directory` (the hub cache's own blobs excepted)."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise HeaderError("points outside the model directory; use plain file names")
    try:
        root = directory.resolve()
        real = (root / name).resolve()
    except RuntimeError as error:  # a loop of links, before Python 3.13
        raise HeaderError("is a loop of links") from error
    allowed = [root]
    if root.parent.name == "snapshots":  # models--org--name/{blobs,snapshots/<revision>}
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(base) for base in allowed):
        raise HeaderError(
            f"is a link out of the model directory (to {real}); pass the directory it points into"
        )
    return real


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a plain file for reading. Raises `OSError`, or `HeaderError` for anything else."""
    # O_NONBLOCK: a FIFO must be refused, not waited for
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise HeaderError("is not a regular file")
    return fd, status


def open_tensors(directory: Path, name: str) -> OpenFile:
    """Open `name` in `directory` and read its header. Raises `HeaderError` with the reason."""
    try:
        path = contained(directory, name)
        fd, status = open_regular(path)
        try:
            return OpenFile(path, fd, status, read_header(fd, status.st_size, path))
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: a NUL in a path
        reason = getattr(error, "strerror", None) or error
        raise HeaderError(f"cannot be opened: {reason}") from error
