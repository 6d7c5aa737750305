"""A command under a memory limit that it cannot talk its way out of, measured from outside.

    python -m benchmarks.memory_group GIB COMMAND [ARGUMENT ...]

Makes a control group (version 1 or 2; that takes root, or a group of one's own), starts the command
in it, and reads what the kernel has counted: file pages that the command brought into memory count
like its own. Where no group can be made the command runs without a limit, and the result says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import print_json

GIB = 2**30
INTERVAL_S = 0.05
# The shell joins the group before it becomes the command, so that nothing is allocated outside.
JOIN = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Usage:
    """What a group took.

    Attributes:
        limit_bytes: the limit; None where none could be set.
        peak_bytes: most memory at one time, file pages included; without a group 0.
        peak_anonymous_bytes: most memory that is no file's, looked at every 50 ms.
        at_limit: times that an allocation ran into the limit.
        killed: whether the kernel killed a process for want of memory.
    """

    limit_bytes: int | None
    peak_bytes: int
    peak_anonymous_bytes: int
    at_limit: int
    killed: bool


class MemoryGroup:
    """A control group for the processes started with `command`; see `memory_group`.

    Attributes:
        folder: where the kernel keeps it; None where none could be made.
        reason: why not.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, reason: str = "") -> None:
        self.folder = folder
        self.reason = reason
        self._limit = limit_bytes
        self._anonymous = 0

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in this group."""
        if self.folder is None:
            return list(command)
        return ["sh", "-c", JOIN, str(self.folder / "cgroup.procs"), *command]

    def usage(self) -> Usage:
        """Return what has been counted so far."""
        if self.folder is None:
            return Usage(None, 0, 0, 0, False)
        peak = self._number("memory.peak", "memory.max_usage_in_bytes")
        events = self._table("memory.events") or self._table("memory.oom_control")
        at_limit = events.get("max", 0) or self._number("memory.failcnt")
        killed = events.get("oom_kill", 0) > 0
        return Usage(self._limit, peak, self._anonymous, at_limit, killed)

    def watch(self) -> None:
        """Look at the memory that is no file's."""
        stat = self._table("memory.stat")
        self._anonymous = max(self._anonymous, stat.get("anon", stat.get("rss", 0)))

    def _number(self, *names: str) -> int:
        assert self.folder is not None
        texts = [(self.folder / n).read_text() for n in names if (self.folder / n).exists()]
        return int(texts[0]) if texts else 0

    def _table(self, name: str) -> dict[str, int]:
        assert self.folder is not None
        file = self.folder / name
        lines = file.read_text().splitlines() if file.exists() else []
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group that is there as long as this; its processes must have ended by then."""
    try:
        folder = _make_group(limit_bytes)
    except OSError as error:
        print(f"no memory limit: a control group cannot be made here ({error})", file=sys.stderr)
        yield MemoryGroup(None, limit_bytes, str(error))
        return
    group, over = MemoryGroup(folder, limit_bytes), threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL_S):
            group.watch()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield group
    finally:
        over.set()
        watcher.join()
        _remove(folder)


def run_limited(
    command: Sequence[str], limit_bytes: int, timeout: float | None = None
) -> tuple[subprocess.CompletedProcess[str], Usage]:
    """Run a command to its end, its output captured."""
    with memory_group(limit_bytes) as group:
        done = subprocess.run(
            group.command(command), capture_output=True, text=True, timeout=timeout, check=False
        )
        return done, group.usage()


def drop_from_cache(*files: Path) -> None:
    """Let the kernel forget its copies of files, which another group may have paid for."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _make_group(limit_bytes: int) -> Path:
    """Raises OSError."""
    parent, version = _own_group()
    if version == 2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        (parent / "cgroup.subtree_control").write_text("+memory")
    folder = parent / f"moe-benchmark-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        if version == 2:
            (folder / "memory.max").write_text(str(limit_bytes))
            swap = folder / "memory.swap.max"
        else:
            (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            swap = folder / "memory.swappiness"
        if swap.exists():
            swap.write_text("0")
    except OSError:
        folder.rmdir()
        raise
    return folder


def _own_group() -> tuple[Path, int]:
    """Folder of the memory group of this process, and the version of its kind."""
    versions: dict[int, Path] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        top = Path("/sys/fs/cgroup")
        if "memory" in controllers.split(","):
            versions[1] = top / "memory" / path.strip("/")
        elif not controllers and (top / "cgroup.controllers").exists():
            versions[2] = top / path.strip("/")
    for version, folder in sorted(versions.items()):
        if (folder / "cgroup.procs").exists():
            return folder, version
    raise FileNotFoundError("no memory control group of this process is to be seen")


def _remove(folder: Path) -> None:
    for _ in range(100):  # the kernel takes a moment to bury the last process
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gib", type=float, help="limit in GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with memory_group(int(options.gib * GIB)) as group:
        code = subprocess.run(group.command(options.command), check=False).returncode
        print_json({"exit_code": code, **asdict(group.usage())})
    return code


if __name__ == "__main__":
    raise SystemExit(main())
