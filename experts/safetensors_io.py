"""Safetensors files from untrusted places: headers checked before use, writes all or nothing, and
reads past the page cache.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
that many bytes of JSON (name -> dtype, shape, data_offsets relative to the end of the header), then
the data, which the tensors must cover exactly: no overlap, no hole, nothing after the last one.
A file that breaks any of these rules is refused whole; the caller collects the reasons.

File names come from the same place as the weights, so absolute paths, `..` and links that leave the
directory are refused. The one link that may leave it is the hub cache's own
``snapshots/<revision>/x -> blobs/<hash>``. A file stays open once it is checked, so a file put in
its place does not mix with it.

Files that are written begin their data at a multiple of 4096 bytes (the header is padded with
spaces, which the format allows), so blobs of whole pages can be read past the page cache. A file
gets its name only when all of it is on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from experts.files import LFS_POINTER, LFS_REFUSAL, MAX_DIMENSION, HeaderError, open_regular

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 64  # torch's own limit

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """The place of one tensor: bytes ``[start, end)`` of `file`, row-major, little-endian."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def pread_exactly(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset`; returns the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def read_header(fd: int, size: int, file: Path) -> dict[str, TensorInfo]:
    """The tensors of the open file `fd` of `size` bytes. Raises `HeaderError` or `OSError`."""
    if size == 0:
        raise HeaderError("is empty (0 bytes)")
    if size < 8:
        raise HeaderError(f"is {size} bytes long, too short for a safetensors header")
    if (first := _read(fd, 8, 0)) == LFS_POINTER[:8]:
        raise HeaderError(LFS_REFUSAL)
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            f"declares a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed "
            "(not a safetensors file?)"
        )
    if 8 + length > size:
        raise HeaderError(f"is truncated: header of {length} bytes in a file of {size} bytes")
    entries = parse_json(_read(fd, length, 8), "a header")
    entries.pop("__metadata__", None)
    data_start = 8 + length
    infos = {name: _entry(name, entry, file, data_start) for name, entry in entries.items()}
    _check_layout(infos, data_start, size)
    return infos


def _read(fd: int, length: int, offset: int) -> bytes:
    buffer = bytearray(length)
    if pread_exactly(fd, memoryview(buffer), offset) != length:
        raise HeaderError("ended while its header was read (is it being written?)")
    return bytes(buffer)


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object whose keys are unique. Raises `HeaderError`."""
    try:
        content = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise HeaderError(f"has {what} that is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise HeaderError(f"has {what} that is a JSON {type(content).__name__}, not an object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _entry(name: str, entry: Any, file: Path, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(
            f"tensor {name!r} has unknown dtype {entry['dtype']!r} (known: {', '.join(DTYPES)})"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_DIMENSION:
        raise HeaderError(f"tensor {name!r} has shape {_short(shape)}, not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"tensor {name!r} has data_offsets {_short(offsets)}, not [begin, end]")
    expected, given = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != given:
        raise HeaderError(
            f"tensor {name!r} has {given} bytes, but shape {shape} of {entry['dtype']} "
            f"takes {_short(expected)}"
        )
    return TensorInfo(file, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_layout(infos: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """The tensors tile the data section. Truncation shows here as a last tensor past the end."""
    past_end = sorted(name for name, info in infos.items() if info.end > size)
    if past_end:
        needed = max(info.end for info in infos.values())
        names = ", ".join(repr(name) for name in past_end[:5])
        more = f" and {len(past_end) - 5} more" if len(past_end) > 5 else ""
        raise HeaderError(
            f"is truncated: {size} bytes, but its header needs {needed}; "
            f"incomplete: {names}{more}. Download the file again"
        )
    position = data_start
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            fault = "overlaps the tensor before it" if info.start < position else "follows a hole"
            raise HeaderError(f"tensor {name!r} {fault}: byte {info.start}, expected {position}")
        position = info.end
    if position != size:
        raise HeaderError(f"has {size - position} bytes after its last tensor")


# Opening


@dataclass(frozen=True)
class OpenFile:
    """An open file whose header is checked; the caller closes `fd`."""

    path: Path
    fd: int
    status: os.stat_result
    tensors: dict[str, TensorInfo]

    @property
    def unchanged(self) -> bool:
        """Return whether size and modification time are those at opening."""
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


# Writing

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
    """Size and checksums of a file that was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    nbytes: int = Field(ge=8)
    header: str = Field(pattern=r"^[0-9a-f]{32}$")
    """blake2b of everything before the data."""
    data: str = Field(pattern=r"^[0-9a-f]{32}$")
    """blake2b of the data."""
    sums: tuple[int, ...] | None = None
    """CRC-32 of each tensor, in the order of the file; null in files of earlier versions."""

    def is_of(self, found: FileRecord) -> bool:
        """Return whether these are the checksums of a file whose record was just read."""
        return (self.nbytes, self.header, self.data) == (found.nbytes, found.header, found.data)


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
    digest, nbytes, sums = digest_of(b""), len(header), list[int]()
    try:
        with unfinished.open("wb") as file:
            file.write(header)
            for entry, tensor in zip(entries, tensors, strict=True):
                assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry
                view = as_bytes(tensor.contiguous())
                nbytes += len(view)
                digest.update(view)
                sums.append(zlib.crc32(view))
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_directory(path.parent)
    return FileRecord(
        nbytes=nbytes,
        header=digest_of(header).hexdigest(),
        data=digest.hexdigest(),
        sums=tuple(sums),
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all, also if others write it now. Raises OSError."""
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


# Reading data

BLOCK = 4096
"""Reads past the page cache need addresses, offsets and lengths that are multiples of this."""

_HUGE_PAGE = 2 << 20
_ONLY_CACHED: int = getattr(os, "RWF_NOWAIT", 0)


def fresh_bytes(nbytes: int) -> Tensor:
    """``(nbytes,)`` uint8; from 2 MiB on page-aligned, in huge pages if the kernel has them."""
    if nbytes < _HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """`torch.empty` for weights: on a CPU as `fresh_bytes`. A step that reads many weights spends a
    tenth of its time on page tables where pages are small."""
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return fresh_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class FileReader:
    """Reads an open file, as fast as the disk can; a context manager. Threads may share it.

    What the page cache has is copied from there. The rest is read past it (O_DIRECT), without a
    copy and without filling the cache: half of a buffered read's time on a fast disk.
    """

    def __init__(self, file: OpenFile) -> None:
        self._fd = file.fd
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without it
                # through /proc: the file that was checked, even if its name is another's now
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
        """Read the leading bytes that are in the page cache."""
        if self._direct is None or not _ONLY_CACHED or not view:
            return 0
        try:
            return os.preadv(self._fd, [view], offset, _ONLY_CACHED)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            return 0

    def _uncached(self, view: memoryview, offset: int) -> int:
        """Read whole blocks past the page cache, if address and offset are aligned."""
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
    """The address of a view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
