"""Writes safetensors files of which every tensor can be read alone, all of a file or none of it.

The data section begins at a multiple of 4096 bytes (the header is padded with spaces, which the
format allows), so that blobs of whole pages can be read past the page cache. A file gets its name
only when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from experts.header import DTYPE_NAMES, pread_exactly

PAGE = 4096
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileRecord(BaseModel):
    """What a finished file is: enough to tell damage from the file that was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    nbytes: int = Field(ge=8)
    header: str = Field(pattern=r"^[0-9a-f]{32}$")
    """blake2b of everything before the data."""
    data: str = Field(pattern=r"^[0-9a-f]{32}$")
    """blake2b of the data."""


def encode_header(entries: Sequence[Entry]) -> bytes:
    """The bytes before the data: length, JSON, and spaces up to a multiple of `PAGE`."""
    header: dict[str, object] = {}
    start = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor]) -> FileRecord:
    """Write the tensors of `entries`, in that order, and give the file its name at the end.

    Raises OSError; a file that could not be finished is removed.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    header = encode_header(entries)
    digest, nbytes = digest_of(b""), len(header)
    try:
        with unfinished.open("wb") as file:
            file.write(header)
            for entry, tensor in zip(entries, tensors, strict=True):
                assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry
                view = as_bytes(tensor.contiguous())
                nbytes += len(view)
                digest.update(view)
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_directory(path.parent)
    return FileRecord(nbytes=nbytes, header=digest_of(header).hexdigest(), data=digest.hexdigest())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all, whoever else writes it. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_directory(path.parent)


def read_record(fd: int) -> FileRecord:
    """The record of an open file, from all its bytes. Raises OSError, ValueError when short."""
    nbytes = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little") + 8
    if not 8 <= length <= nbytes:
        raise ValueError("is truncated")
    digests = []
    buffer = bytearray(CHUNK_BYTES)
    for start, stop in ((0, length), (length, nbytes)):
        digest = digest_of(b"")
        for offset in range(start, stop, CHUNK_BYTES):
            view = memoryview(buffer)[: min(CHUNK_BYTES, stop - offset)]
            if pread_exactly(fd, view, offset) != len(view):
                raise ValueError("became shorter while it was read")
            digest.update(view)
        digests.append(digest.hexdigest())
    return FileRecord(nbytes=nbytes, header=digests[0], data=digests[1])


def digest_of(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
