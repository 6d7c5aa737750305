"""Download a model of a hub into huggingface_hub's cache, with one count of bytes for all files.

huggingface_hub places and links files; it begins a file anew after each stop. Here large files
continue: each is written to ``<blob>.part`` in the same cache until it is complete. Other tools
find the result as if they had downloaded it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm

from moe.errors import CheckpointError
from moe.loading.gguf.directory import SPLIT
from moe.loading.memory_plan import size_text
from moe.loading.progress import LoadProgress, Report
from moe.loading.remote.names import COPIES, PATTERNS, HubName, choose_files
from moe.loading.remote.repository import HubFile, Repository, hub_errors

AT_ONCE = 8
"""Files that are downloaded at the same time."""
LARGE = 8 << 20
"""Bytes from which on a file is continued after a stop."""


def cached(name: HubName) -> Path | None:
    """What a download of this name left in the cache, without asking the hub.

    Returns a directory, or the first part of a GGUF file; None where something is missing.
    """
    try:
        folder = Path(_local(name, []))
        sizes = {
            str(file.relative_to(folder)): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file()
        }
        choice = choose_files(name, sizes)
        if not choice.gguf:
            return Path(_local(name, list(PATTERNS)))
    except (LocalEntryNotFoundError, CheckpointError, OSError):
        return None
    first = next(iter(choice.weights))
    split = SPLIT.fullmatch(first)
    return folder / first if split is None or int(split[3]) == len(choice.weights) else None


def _local(name: HubName, patterns: list[str]) -> str:
    """The snapshot; raises `LocalEntryNotFoundError` where a file of these patterns is missing."""
    found: str = snapshot_download(
        name.repository,
        revision=name.revision,
        local_files_only=True,
        allow_patterns=patterns,
        ignore_patterns=list(COPIES),
    )
    return found


def download(repository: Repository, report: Report) -> Path:
    """The snapshot of a repository in the cache, or the first part of the GGUF file in it.

    Raises:
        CheckpointError: the disk is too small, or the hub stops answering.
    """
    name, choice = repository.name, repository.choice
    files = [repository.files[path] for path in (*choice.weights, *choice.others)]
    blobs = Path(
        constants.HF_HUB_CACHE, repo_folder_name(repo_id=name.repository, repo_type="model")
    )
    blobs = blobs / "blobs"
    with hub_errors(name):
        blobs.mkdir(parents=True, exist_ok=True)
        _fetch_all([file for file in files if file.size >= LARGE], blobs, name, report)
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=_Silent,
        )
    return Path(folder, next(iter(choice.weights))) if choice.gguf else Path(folder)


class _Silent(tqdm):
    """No bar: ours counts the bytes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


class _Stopped(Exception):
    """Another file failed, or the user interrupts."""


def _fetch_all(files: Sequence[HubFile], blobs: Path, name: HubName, report: Report) -> None:
    done, total, lock, stop = 0, sum(file.size for file in files), Lock(), Event()

    def advance(count: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _Stopped
        with lock:
            done += count
            report(LoadProgress(f"downloading {name}", done, total))

    _check_disk(name, blobs, files)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(fetch, file, blobs / file.etag, advance) for file in files]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def fetch(file: HubFile, target: Path, advance: Callable[[int], object]) -> None:
    """Write a file of a hub to `target`, and go on where an earlier attempt stopped.

    Processes that want the same file wait for each other.

    Args:
        advance: called with every number of bytes that are there; may raise to stop.

    Raises:
        CheckpointError: the hub sent another number of bytes than it announced.
        OSError: the file cannot be written. And as `HubFile.stream`.
    """
    part = _part_of(target)
    with part.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        if target.exists():
            part.unlink(missing_ok=True)  # ours, made after the other process was done
            advance(file.size)
            return
        if out.tell() > file.size:
            out.truncate(0)
        advance(done := out.seek(0, os.SEEK_END))
        for piece in file.stream(done, file.size):
            out.write(piece)
            done += len(piece)
            advance(len(piece))
        out.flush()
        if done != file.size:
            part.unlink()
            raise CheckpointError(
                f"{file.url} sent {done} bytes and announced {file.size}; try again"
            )
        os.fsync(out.fileno())
        part.rename(target)


def _part_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _check_disk(name: HubName, blobs: Path, files: Sequence[HubFile]) -> None:
    """Raise `CheckpointError` where what is missing is more than the disk has room for."""
    missing = 0
    for file in files:
        target = blobs / file.etag
        part = _part_of(target)
        if not target.exists():
            missing += file.size - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        raise CheckpointError(
            f"{name} needs {size_text(missing).strip()} more, and {blobs.parents[1]} has "
            f"{size_text(free).strip()} free; make room, set HF_HOME to a larger disk, or "
            f"convert it without a download: moe convert {name} STORE"
        )
