"""A model directory of files on a hub: headers are real, the data is a hole.

Everything that reads headers only (plans above all) works on it as on a downloaded model. Reading
from a hole gives zeros; `moe.loading.remote.reader.HubBytes` reads what it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from experts.files import HeaderError
from experts.manifest import MANIFEST_NAME
from experts.safetensors_io import MAX_HEADER_BYTES
from moe.errors import CheckpointError
from moe.loading.checkpoint import INDEX_NAME
from moe.loading.gguf.config import rotary_tensors
from moe.loading.gguf.directory import gguf_directory, temporary_folder
from moe.loading.gguf.header import read_gguf
from moe.loading.remote.repository import HubFile, Repository, hub_errors

FIRST = 128 << 10
"""Bytes of a safetensors file that are asked for first; most headers are shorter."""
STEP = 1 << 20
"""Bytes of a GGUF file that are asked for at a time, as it does not say how long its header is."""
FOR_PLANS = ("config.json", INDEX_NAME, MANIFEST_NAME)
AT_ONCE = 8


@dataclass(frozen=True)
class Outline:
    """An outline of a repository; removed when the process ends.

    Attributes:
        path: the directory.
        files: what each weight file in it stands for.
    """

    path: Path
    files: Mapping[Path, HubFile]


def outline(repository: Repository, *, whole: bool) -> Outline:
    """Make the outline of a repository's model.

    Args:
        whole: also fetch the tokenizer and what else a store keeps; not needed for plans.

    Raises:
        CheckpointError: the hub stops answering, or a file is no file of weights.
    """
    name, choice = repository.name, repository.choice
    path = temporary_folder("moe-outline-").resolve() / name.repository.rpartition("/")[2]
    files = {path / weights: repository.files[weights] for weights in choice.weights}
    others = [other for other in choice.others if whole or other in FOR_PLANS]
    for file in (*files, *(path / other for other in others)):
        file.parent.mkdir(parents=True, exist_ok=True)
    with hub_errors(name), ThreadPoolExecutor(AT_ONCE) as pool:
        make = _outline_gguf if choice.gguf else _outline_safetensors
        jobs = [pool.submit(make, file, at) for at, file in files.items()]
        jobs += [pool.submit(_copy, repository.files[other], path / other) for other in others]
        for job in jobs:
            job.result()
    if choice.gguf:
        path = gguf_directory(next(iter(files)), tokenizer=whole)
    return Outline(path, files)


def _copy(file: HubFile, at: Path) -> None:
    at.write_bytes(file.content())


def _outline_safetensors(file: HubFile, at: Path) -> None:
    with at.open("wb") as out:
        start = bytearray(min(file.size, FIRST))
        file.read(memoryview(start))
        out.write(start)
        length = 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES)
        if len(start) < (end := min(length, file.size)):
            rest = bytearray(end - len(start))
            file.read(memoryview(rest), len(start))
            out.write(rest)
        out.truncate(file.size)


def _outline_gguf(file: HubFile, at: Path) -> None:
    with at.open("wb") as out:
        out.truncate(file.size)
        try:
            _, tensors = read_gguf(_Growing(file, out), file.size, at)
            for tensor in rotary_tensors(tensors).values():
                data = bytearray(tensor.end - tensor.start)
                file.read(memoryview(data), tensor.start)
                out.seek(tensor.start)
                out.write(data)
        except (HeaderError, ValueError) as error:
            raise CheckpointError(f"{file.url} {error}") from error


class _Growing:
    """Reads a remote file from its beginning, and writes what it has read to a local one."""

    def __init__(self, file: HubFile, out: BinaryIO) -> None:
        self._file, self._out = file, out
        self._held, self._fetched = bytearray(), 0

    def read(self, count: int) -> bytes:
        """The next `count` bytes, or fewer where the file ends."""
        while len(self._held) < count and self._fetched < self._file.size:
            piece = bytearray(min(STEP, self._file.size - self._fetched))
            self._file.read(memoryview(piece), self._fetched)
            self._out.write(piece)
            self._fetched += len(piece)
            self._held += piece
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken
