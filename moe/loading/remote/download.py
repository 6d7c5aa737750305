"""Download a model of a hub into huggingface_hub's cache, with one count of bytes for all files.

huggingface_hub begins a file anew after each stop, and believes the hub's names and bytes. Here
files continue: each is written to ``<blob>.part`` in the same cache until it is complete and has
the hash that the list of files states. Other tools find the result as if they had downloaded it:
blobs by their hash, a folder of links for the commit, and the commit of a branch or tag.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from uuid import uuid4

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from experts.files import MAX_SMALL_BYTES
from experts.safetensors_io import CHUNK_BYTES, write_bytes
from moe.errors import CheckpointError
from moe.loading.progress import LoadProgress, Report, size_text
from moe.loading.remote.names import COPIES, PATTERNS, HubName, choose_files
from moe.loading.remote.repository import HubFile, Repository, hub_errors

AT_ONCE = 8
"""Files that are downloaded at the same time."""
_PART_OF_MANY = re.compile(r".+-(\d{5})-of-(\d{5})\.(?:gguf|safetensors)")


def cached(name: HubName) -> Path | None:
    """Find an earlier download of this name in the cache, without asking the hub.

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
            folder = Path(_local(name, list(PATTERNS)))
    except (LocalEntryNotFoundError, CheckpointError, OSError):
        return None
    if not _are_all(choice.weights):
        return None
    return folder / next(iter(choice.weights)) if choice.gguf else folder


def _are_all(weights: Iterable[str]) -> bool:
    """Return whether no part of a split file is missing, as far as names tell."""
    parts = [_PART_OF_MANY.fullmatch(file) for file in weights]
    return all(part is None or int(part[2]) == len(parts) for part in parts)


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
        CheckpointError: the disk is too small, or the hub stops answering, or does not send what
            its list of files states.
    """
    name, choice = repository.name, repository.choice
    # Weights get their names last: what is there without them is nothing that could be loaded
    files = [repository.files[path] for path in (*choice.others, *choice.weights)]
    place = _CachePlace(name, repository.commit)
    with hub_errors(name):
        place.blobs.mkdir(parents=True, exist_ok=True)
        _fetch_all([file for file in files if not place.has(file)], place.blobs, name, report)
        for file in files:
            place.link(file)
        place.name_commit(name.revision or constants.DEFAULT_REVISION)
    return place.snapshot / next(iter(choice.weights)) if choice.gguf else place.snapshot


class _CachePlace:
    """The place of one commit's files in huggingface_hub's cache."""

    def __init__(self, name: HubName, commit: str) -> None:
        folder = repo_folder_name(repo_id=name.repository, repo_type="model")
        self._root, self._commit = Path(constants.HF_HUB_CACHE, folder), commit
        self.blobs = self._root / "blobs"
        self.snapshot = self._root / "snapshots" / commit

    def has(self, file: HubFile) -> bool:
        """Return whether the file is in the snapshot."""
        at = self.snapshot / file.path
        return at.is_file() and at.stat().st_size == file.size

    def link(self, file: HubFile) -> None:
        """Put a downloaded file into the snapshot. Raises OSError."""
        if self.has(file):
            return
        at, blob = self.snapshot / file.path, self.blobs / file.etag
        at.parent.mkdir(parents=True, exist_ok=True)
        made = at.with_name(f".{uuid4().hex}")
        try:
            made.symlink_to(os.path.relpath(blob, at.parent))
        except OSError:  # a file system without links, where several may have this content
            if file.size > MAX_SMALL_BYTES:
                blob.replace(at)
                return
            shutil.copyfile(blob, made)
        made.replace(at)

    def name_commit(self, revision: str) -> None:
        """Remember which commit a branch or tag is."""
        if revision != self._commit:
            at = self._root / "refs" / revision
            with suppress(OSError):  # "a" in place of "a/b": of an earlier time, and only a name
                at.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(at, self._commit.encode())


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
            for job in as_completed(jobs):
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
        CheckpointError: what came has another hash than the list of files states; it is removed.
        OSError: the file cannot be written. And as `HubFile.stream`.
    """
    part = _part_of(target)
    with part.open("a+b") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        if target.exists() and target.stat().st_size == file.size:
            part.unlink(missing_ok=True)  # ours, made after the other process was done
            advance(file.size)
            return
        done = out.seek(0, os.SEEK_END)
        if done > file.size:
            done = out.truncate(0)
        digest = file.new_digest()
        out.seek(0)
        while piece := out.read(CHUNK_BYTES):
            digest.update(piece)
        advance(done)
        for piece in file.stream(done, file.size):
            digest.update(piece)
            out.write(piece)
            advance(len(piece))
        out.flush()
        try:
            file.check(digest.hexdigest())
        except CheckpointError:
            part.unlink()  # else each further try would go on from it
            raise
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
