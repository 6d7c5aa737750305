"""The header of one GGUF file, read and checked without trusting a byte of it.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, keys
with values, the tensors' names, sizes, types and offsets, then their data, aligned. Every length is
checked against what is left of the file before anything is made of it. A file that breaks a rule is
refused whole. Numbers are little-endian; dimensions are turned into torch's order.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from experts.files import LFS_POINTER, LFS_REFUSAL, MAX_DIMENSION, HeaderError, open_regular
from moe.errors import UnsupportedModelError
from moe.extras import install_line

# ggml's types of tensors, by the optional package ``gguf``, imported when first needed.

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that torch has, too."""


def package() -> Any:
    """The ``gguf`` package; raises `UnsupportedModelError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            "reading GGUF files wants the package gguf, which is not installed: "
            + install_line("gguf")
        ) from error
    return gguf


def kind_name(kind: int) -> str:
    """Return ggml's name of a type."""
    return str(package().GGMLQuantizationType(kind).name)


def decode(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """The numbers that blocks of a type stand for. Raises `RuntimeError` for some types."""
    gguf = package()
    with np.errstate(all="ignore"):  # what is not finite is found later, by name
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    return np.ascontiguousarray(values, np.float32)


MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_BYTES = 1 << 28  # the largest known vocabularies take a tenth of it
MAX_ITEMS = 1 << 22
"""Most items of an array: above any number of tokens or merges."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """Bytes ``[start, end)`` of `file`: rows of blocks of ggml's type `kind`."""

    file: Path
    kind: int
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """An open file, checked. The caller closes `fd`."""

    path: Path
    fd: int
    status: os.stat_result
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Open a file and read its header. Raises `HeaderError` with the reason."""
    try:
        fd, status = open_regular(path)
        try:
            with open(fd, "rb", closefd=False) as stream:
                return GgufFile(path, fd, status, *read_gguf(stream, status.st_size, path))
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError) as error:
        raise HeaderError(
            f"cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from error


class Stream(Protocol):
    """A stream that a header is read from."""

    def read(self, count: int, /) -> bytes: ...


def read_gguf(
    stream: Stream, size: int, path: Path
) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Keys and tensors of a file of `size` bytes, which `path` names in them.

    Raises `HeaderError`, or ValueError for text that is none.
    """
    header = _Header(stream, size)
    if (first := header.take(4)) == LFS_POINTER[:4]:
        raise HeaderError(LFS_REFUSAL)
    if first != MAGIC:
        raise HeaderError("does not begin with GGUF, so it is not a GGUF file")
    version = header.number("I")
    if version not in VERSIONS:
        raise HeaderError(f"is GGUF version {version}, only 2 and 3 (little-endian) can be read")
    num_tensors, num_keys = header.number("Q"), header.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.text()
        if key in metadata:
            raise HeaderError(f"states {key!r} twice")
        metadata[key] = header.value(header.number("I"))
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = header.text()
        if name in found:
            raise HeaderError(f"has two tensors {name!r}")
        dimensions = header.number("I")
        if dimensions > 4:
            raise HeaderError(f"tensor {name!r} has {dimensions} dimensions, 4 is the most")
        shape = tuple(header.number("Q") for _ in range(dimensions))[::-1]
        if dimensions == 4 and shape[0] == 1:
            shape = shape[1:]  # as llama.cpp's quantiser leaves it out
        found[name] = shape, header.number("I"), header.number("Q")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
        raise HeaderError(f"has general.alignment {alignment!r}, which is not a power of two")
    data = -(-header.position // alignment) * alignment
    tensors = {
        name: _placed(path, name, shape, kind, offset, alignment, data)
        for name, (shape, kind, offset) in found.items()
    }
    _check_layout(tensors, size)
    return metadata, tensors


class _Header:
    """The part of a header that has been read; never more than there is."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream, self._size, self.position = stream, size, 0

    def take(self, count: int) -> bytes:
        if self.position + count > min(self._size, MAX_HEADER_BYTES):
            raise HeaderError(
                f"is truncated or damaged: its header wants {count} bytes at {self.position}, and "
                f"the file has {self._size} (of which a header may take {MAX_HEADER_BYTES})"
            )
        taken = self._stream.read(count)
        if len(taken) != count:
            raise HeaderError("ended while its header was read (is it being written?)")
        self.position += count
        return taken

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()  # UnicodeDecodeError is a ValueError

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise HeaderError(f"has a value of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            raise HeaderError(f"has an array of {count} values, {MAX_ITEMS} is the most")
        if inner in _SCALARS:
            items = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(items, self.take(struct.calcsize(items))))
        if inner != _STRING:
            raise HeaderError(f"has an array of values of type {inner}, which cannot be read")
        return [self.text() for _ in range(count)]


def _placed(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, alignment: int, data: int
) -> GgufTensor:
    gguf = package()
    try:
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        decode(np.zeros(nbytes, np.uint8), kind)
    except (KeyError, ValueError, RuntimeError) as error:  # the last: known, not decoded
        raise HeaderError(
            f"tensor {name!r} has type {kind}, which this version of the package gguf cannot decode"
        ) from error
    if not shape or min(shape) < 1 or max(shape) > MAX_DIMENSION or shape[-1] % block:
        raise HeaderError(
            f"tensor {name!r} has shape {shape}: sizes must be positive, and rows of "
            f"{kind_name(kind)} whole blocks of {block}"
        )
    if offset % alignment:
        raise HeaderError(f"tensor {name!r} has offset {offset}, which is not aligned")
    start = data + offset
    return GgufTensor(path, kind, shape, start, start + math.prod(shape) // block * nbytes)


def _check_layout(tensors: dict[str, GgufTensor], size: int) -> None:
    """All inside the file, none over another; padding between them is allowed."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < position:
            raise HeaderError(f"tensor {name!r} overlaps the tensor before it")
        if tensor.end > size:
            raise HeaderError(
                f"is truncated: {size} bytes, and tensor {name!r} ends at {tensor.end}; download "
                "the file again"
            )
        position = tensor.end
