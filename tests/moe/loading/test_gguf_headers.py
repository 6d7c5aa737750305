"""Each rule of a GGUF header, broken alone."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pytest

from experts.files import HeaderError
from moe.loading.gguf import header
from moe.loading.gguf.header import read_gguf

U8, U32, STRING, ARRAY, U64 = 0, 4, 8, 9, 10
F32, Q8_0, Q8_1 = 0, 8, 9
Q8_1_TENSOR = ("q", [32], Q8_1, 0)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(
    keys: list[tuple[str, int, bytes]], tensors: list[tuple[str, list[int], int, int]]
) -> bytes:
    """A file with 256 bytes of data; tensors are name, sizes, type and offset."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, kind, value in keys:
        head += text(key) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return head + bytes(-len(head) % 32) + bytes(256)


def read(content: bytes, stream: Any = None) -> Any:
    return read_gguf(stream or io.BytesIO(content), len(content), Path("a.gguf"))


def test_a_header_without_faults_is_read() -> None:
    words = struct.pack("<IQ", STRING, 2) + text("a") + text("b")
    numbers = struct.pack("<IQ3B", U8, 3, 1, 2, 3)
    keys = [
        ("a", U32, struct.pack("<I", 7)),
        ("b", STRING, text("c")),
        ("c", ARRAY, words),
        ("d", ARRAY, numbers),
    ]
    metadata, tensors = read(gguf(keys, [("x", [8, 1, 2, 1], F32, 0), ("y", [32], Q8_0, 64)]))
    assert metadata == {"a": 7, "b": "c", "c": ["a", "b"], "d": [1, 2, 3]}
    assert {name: found.shape for name, found in tensors.items()} == {"x": (2, 1, 8), "y": (32,)}
    assert [found.end - found.start for found in tensors.values()] == [64, 34]


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([("a", U8, b"1"), ("a", U8, b"2")], [], "states 'a' twice"),
        ([("a", 13, b"")], [], "has a value of the unknown type 13"),
        (
            [("a", ARRAY, struct.pack("<IQ", U8, 9) + bytes(9))],
            [],
            "has an array of 9 values, 8 is the most",
        ),
        (
            [("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))],
            [],
            "has an array of values of type 9, which cannot be read",
        ),
        *(
            (
                [("general.alignment", kind, value)],
                [],
                f"has general.alignment {said}, which is not a power of two",
            )
            for kind, value, said in (
                (U32, struct.pack("<I", 0), "0"),
                (U32, struct.pack("<I", 48), "48"),
                (STRING, text("32"), "'32'"),
                (7, b"\1", "True"),
            )
        ),
        ([], [("x", [1] * 5, F32, 0)], "tensor 'x' has 5 dimensions, 4 is the most"),
        ([], [("x", [4], 99, 0)], "tensor 'x' has type 99, which this version of the package"),
        ([], [Q8_1_TENSOR], "tensor 'q' has type 9, which this version of the package"),
        ([], [("x", [], F32, 0)], r"tensor 'x' has shape \(\): sizes must be positive"),
        ([], [("x", [0], F32, 0)], r"tensor 'x' has shape \(0,\): sizes must be positive"),
        ([], [("x", [1 << 49], F32, 0)], "tensor 'x' has shape .*: sizes must be positive"),
        ([], [("x", [33], Q8_0, 0)], "tensor 'x' has shape .*, and rows of Q8_0 whole blocks"),
        ([], [("x", [4], F32, 16)], "tensor 'x' has offset 16, which is not aligned"),
        ([], [("x", [9], F32, 0), ("y", [4], F32, 32)], "tensor 'y' overlaps the tensor before"),
        ([], [("x", [65], F32, 0)], "is truncated: .* bytes, and tensor 'x' ends at "),
    ],
)
def test_a_rule_that_is_broken_is_named(
    keys: Any, tensors: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "MAX_ITEMS", 8)
    with pytest.raises(HeaderError, match=f"^{message}"):
        read(gguf(keys, tensors))


def test_a_file_that_shrinks_while_it_is_read_is_told_apart() -> None:
    content = gguf([("a", U32, bytes(4))], [])
    with pytest.raises(HeaderError, match=r"^ended while its header was read \(is it being wri"):
        read(content, io.BytesIO(content[:40]))
