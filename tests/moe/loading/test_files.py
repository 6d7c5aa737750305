"""Safetensors files that are damaged, incomplete or hostile: refused, all faults in one message."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from experts.safetensors_io import DTYPES
from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint

F32_2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def index(directory: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_reads_every_dtype_and_shape_as_stored(tmp_path: Path) -> None:
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype)
        for name, dtype, shape in [
            (f"{code}.{len(shape)}", dtype, shape)
            for code, dtype in DTYPES.items()
            for shape in [(), (5,), (4, 3), (2, 0, 3)]
        ]
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            got = checkpoint.read(name)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.tolist() == expected.tolist()
        rows = checkpoint.read("BF16.2", rows=slice(1, 3))
        assert torch.equal(rows, tensors["BF16.2"][1:3])
        assert checkpoint.read("BF16.2", rows=slice(3, 1)).shape == (0, 3)


def test_shards_of_an_index_and_shards_without_one(tmp_path: Path) -> None:
    one, two = {"a": torch.arange(3.0)}, {"b": torch.arange(4.0)}
    save_file(one, tmp_path / "x-1.safetensors")
    save_file(two, tmp_path / "x-2.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}
    index(tmp_path, {"b": "x-2.safetensors"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"b"}


HEADERS = {
    "empty file": (b"", "model.safetensors: is empty"),
    "seven bytes": (b"1234567", "is 7 bytes long, too short"),
    "huge header": (struct.pack("<Q", 1 << 40), "declares a header of 1099511627776 bytes"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n",
        "model.safetensors: is a pointer of Git LFS, not the file; run git lfs pull",
    ),
    "header past end": (struct.pack("<Q", 99) + b"{}", "is truncated: header of 99 bytes"),
}


@pytest.mark.parametrize(("content", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_file_without_a_header(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, message)


ENTRIES: dict[str, tuple[Any, bytes, str]] = {
    "not utf-8": (b"\xff\xfe", b"", "not valid JSON: 'utf-8' codec"),
    "not JSON": (b"{", b"", "not valid JSON"),
    "nested deep": (b"[" * 100_000, b"", "JSON: (maximum recursion|.*nest)"),
    "NaN": (b'{"a": NaN}', b"", "NaN is not JSON"),
    "a list": (b"[]", b"", "a JSON list, not an object"),
    "key twice": (b'{"a": 1, "a": 2}', b"", "key 'a' appears twice"),
    "entry keys": ({"a": {"dtype": "F32"}}, b"", "'a' needs exactly dtype, shape and data_offsets"),
    "dtype": ({"a": F32_2 | {"dtype": "F31"}}, bytes(8), "unknown dtype 'F31' .known: BOOL"),
    "dtype list": ({"a": F32_2 | {"dtype": []}}, bytes(8), "unknown dtype"),
    "negative size": ({"a": F32_2 | {"shape": [-2]}}, bytes(8), r"has shape \[-2\], not a list"),
    "boolean size": ({"a": F32_2 | {"shape": [True, 2]}}, bytes(8), "has shape .True, 2., not"),
    "vast size": ({"a": F32_2 | {"shape": [0, 1 << 60]}}, bytes(8), "not a list of sizes"),
    "offsets": ({"a": F32_2 | {"data_offsets": [8, 0]}}, bytes(8), r"data_offsets \[8, 0\], not"),
    "bytes": ({"a": F32_2 | {"shape": [3]}}, bytes(8), r"'a' has 8 bytes, but shape \[3\] .* 12"),
    "truncated": ({"a": F32_2}, bytes(5), "is truncated: .* incomplete: 'a'"),
    "trailing": ({"a": F32_2}, bytes(9), "has 1 bytes after its last tensor"),
    "overlap": ({"a": F32_2, "b": F32_2}, bytes(8), "'b' overlaps the tensor before it"),
    "hole": ({"a": F32_2 | {"data_offsets": [4, 12]}}, bytes(12), "'a' follows a hole"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "data", "message"), ENTRIES.values(), ids=ENTRIES.keys())
def test_bad_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, message)


def test_every_faulty_file_is_listed_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "good.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "twice.safetensors")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "short.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines == [
        f"cannot use the weights in {tmp_path} (3 problems):",
        "  - empty.safetensors: is empty (0 bytes)",
        "  - short.safetensors: is 3 bytes long, too short for a safetensors header",
        "  - twice.safetensors: tensor 'a' is also in good.safetensors",
    ]


def test_directory_without_safetensors(tmp_path: Path) -> None:
    refused(tmp_path, r"no \.safetensors file in .*expected model\.safetensors .*found: nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, r"holds only pickle weights \(pytorch_model\.bin\).*re-save the model")


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "cannot list .*nowhere: No such file")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, r"\.\./secret.* points outside the model directory"),
        ({"a": "/etc/passwd"}, "/etc/passwd: points outside the model directory"),
        ({"a": ""}, "points outside the model directory"),
        ({"a": "absent.safetensors"}, "absent.safetensors: cannot be opened: No such file"),
        ({"a": "nul\0.safetensors"}, "cannot be opened: .*null"),
        ({"a": 3}, "file of tensor 'a' is not a string"),
        ({"b": "x.safetensors"}, "x.safetensors: does not hold tensor 'b'"),
        ([], "has no weight_map"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.ones(2)}, directory / "x.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    index(directory, weight_map)
    refused(directory, message)


def test_index_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "model.safetensors.index.json: cannot be read")


def test_links_stay_inside_the_directory_or_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--o--n" / "blobs", tmp_path / "models--o--n/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    with Checkpoint.open(snapshot) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").symlink_to(blobs / "0123")
    refused(elsewhere, "is a link out of the model directory .*pass the directory it points into")
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "model.safetensors").symlink_to("model.safetensors")
    refused(loop, "loop of links|cannot be opened|Symlink loop")


def test_fifo_and_directory_are_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    refused(tmp_path, "(?s)a.safetensors: is not a regular file.*b.safetensors: ")
