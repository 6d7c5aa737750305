"""The header of one safetensors file, read and checked without trusting a byte of it.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
that many bytes of JSON (name -> dtype, shape, data_offsets relative to the end of the header), then
the data, which the tensors must cover exactly: no overlap, no hole, nothing after the last one.
A file that breaks any of these rules is refused whole; the caller collects the reasons.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSION = 1 << 48  # beyond any memory; keeps products of sizes inside torch's int64
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
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeaderError(Exception):
    """Why one file is refused; whoever opens it says which one, and what else is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes ``[start, end)`` of `file`, row-major, little-endian."""

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
    length = int.from_bytes(_read(fd, 8, 0), "little")
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
