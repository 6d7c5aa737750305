"""The files below `memory.prefix_dir` as others leave them: links, pipes, foreign and poisoned
files, another server in the same directory, a disk that fails and a clock that jumps."""

from __future__ import annotations

import json
import os
import resource
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.build import load_library
from kernels.cpu.kv import BLOCK, NativeKV
from moe import MoE, SamplingParams
from moe.kv import block_codec, prefix_store
from moe.kv.block_codec import BlockError, decode_block, encode_block
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat, RowLayout, Shape, StoredBlock
from moe.kv.prefix_store import PrefixStore

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
IDS = list(range(BLOCK))
DIGEST = b"\1" * 16


def block(nbytes: int = 1024) -> StoredBlock:
    return StoredBlock({0: RowLayout("float32", 1, 2, 2)}, [torch.ones(nbytes, dtype=torch.uint8)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    with opened(tmp_path / "kept") as made:
        yield made


@contextmanager
def opened(root: Path, most_bytes: int = 1 << 20) -> Iterator[PrefixStore]:
    root.mkdir(mode=0o700, exist_ok=True)
    made = PrefixStore(root, "model", most_bytes)
    yield made
    made.finish()


def write(store: PrefixStore, number: int = 1, nbytes: int = 1024, used: int = 1) -> Path:
    path = store._path(bytes([number]) * 16)
    store._write(path, IDS, block(nbytes), used)
    return path


def read(store: PrefixStore) -> int:
    """How many blocks are read; within a time in which nobody waits for a pipe."""
    return len(store.read([DIGEST], IDS).result(timeout=10))


def test_what_is_written_is_read(store: PrefixStore) -> None:
    write(store)
    assert (read(store), store.dropped_files, store.saved_blocks) == (1, 0, 1)


def link_to_a_file(path: Path) -> None:
    path.symlink_to(write_secret(path))


def write_secret(path: Path) -> Path:
    target = path.parents[2] / "secret.kv"
    target.write_bytes(b"".join(encode_block(block(), IDS)))
    return target


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)
        listener.bind(path.name)


def vast_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(prefix_store._MOST_BYTES + 1)


@pytest.mark.parametrize(
    "make",
    [
        link_to_a_file,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x89PNG" * 100),
        listening_socket,
        vast_file,
    ],
    ids=["link", "device", "loose", "pipe", "folder", "empty", "foreign", "socket", "vast"],
)
def test_what_is_no_file_of_ours_is_deleted_and_nothing_else(
    store: PrefixStore, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = store._path(DIGEST)
    make(path)
    assert (read(store), store.dropped_files) == (0, 1)
    assert not os.path.lexists(path)
    assert make is not link_to_a_file or (tmp_path / "secret.kv").exists()
    write(store)
    assert read(store) == 1


def test_files_behind_links_are_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither counted, nor deleted, nor written."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("old.kv", "old.unfinished"):
        (other / name).write_bytes(bytes(4096))
        os.utime(other / name, (1, 1))
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / "linked").symlink_to(other)
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    with opened(tmp_path / "kept", most_bytes=1500) as store:
        write(store)
        assert store.saved_blocks == 1
    assert {file.name for file in other.iterdir()} == {"old.kv", "old.unfinished"}
    (tmp_path / "away").mkdir(mode=0o700)
    (tmp_path / "away" / "model").symlink_to(other)
    with opened(tmp_path / "away") as store:
        write(store)
        assert store.saved_blocks == 0
    assert {file.name for file in other.iterdir()} == {"old.kv", "old.unfinished"}
    assert "no more prefixes are saved to" in caplog.text


def test_a_folder_among_the_files_ends_no_saving(tmp_path: Path) -> None:
    with opened(tmp_path / "kept", most_bytes=2000) as store:
        store._path(b"\7" * 16).mkdir()
        for number in range(4):
            write(store, number)
        assert (store.saved_blocks, store._stopped) == (4, False)


def test_two_servers_share_a_limit(tmp_path: Path) -> None:
    most = 64 << 10
    with opened(tmp_path / "kept", most) as one, opened(tmp_path / "kept", most) as other:
        for number in range(120):
            write((one, other)[number % 2], number, used=number)
            held = sum(file.stat().st_size for file in (tmp_path / "kept").glob("*/*.kv"))
            assert held <= most * 9 // 8
        assert (one.saved_blocks, other.saved_blocks) == (60, 60)


def test_a_server_whose_clock_jumps_costs_another_a_block_and_not_the_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what the other is writing for what a killed process has left."""
    with opened(tmp_path / "kept") as one, opened(tmp_path / "kept") as other:

        def encode(stored: StoredBlock, token_ids: Any) -> Any:
            with monkeypatch.context() as jump:
                jump.setattr(prefix_store.time, "time", lambda: 4e9)
                other._trim()
            return encode_block(stored, token_ids)

        with monkeypatch.context() as patch:
            patch.setattr(prefix_store, "encode_block", encode)
            write(one)
        assert (one.saved_blocks, one._stopped, other.dropped_files) == (0, False, 1)
        write(one)
        assert read(other) == 1


def test_a_folder_that_is_deleted_is_made_again(store: PrefixStore, tmp_path: Path) -> None:
    write(store).unlink()
    (tmp_path / "kept" / "model").rmdir()
    write(store)  # which fails, and makes it
    write(store)
    assert read(store) == 1


def test_a_file_that_the_system_does_not_let_grow_ends_the_saving_only(
    store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As a full disk does; and nothing is left of it."""
    path = write(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        write(store, 2, nbytes=1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no more prefixes are saved" in caplog.text
    assert "File too large" in caplog.text
    assert list(path.parent.iterdir()) == [path]
    assert read(store) == 1


def test_a_disk_that_cannot_be_read_costs_the_prefix(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(store)

    def failing(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(prefix_store, "_plain_bytes", failing)
        assert read(store) == 0
    assert "cannot be read" in caplog.text
    assert path.exists()
    assert read(store) == 1


def test_a_directory_that_cannot_be_written_ends_the_saving_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(30, "Read-only file system")

    with opened(tmp_path / "kept") as store:
        write(store)
        with monkeypatch.context() as patch:
            patch.setattr(prefix_store.os, "utime", refuse)
            write(store, 2)
            assert read(store) == 1
    assert caplog.text.count("Read-only file system") == 1


# Poisoned: a checksum that is right, of a layout that is not

Fields = list[list[Any]]
LAYOUTS: dict[str, Callable[[Fields], Fields]] = {
    "fewer": lambda fields: fields[:1],
    "none": lambda fields: [],
    "twice": lambda fields: [fields[0], fields[0]],
    "true": lambda fields: [fields[0], [True, *fields[1][1:]]],
    "fraction": lambda fields: [[0.5, *fields[0][1:]], fields[1]],
    "negative": lambda fields: [fields[0], [-1, *fields[1][1:]]],
    "another": lambda fields: [fields[0], [7777, *fields[1][1:]]],
    "named": lambda fields: [[["x", 0], *fields[0][1:]], fields[1]],
    "vast": lambda fields: [[*fields[0][:3], 1 << 70, *fields[0][4:]], fields[1]],
    "text": lambda fields: [[*fields[0][:3], "2", *fields[0][4:]], fields[1]],
    "heads": lambda fields: [[*own[:3], 2 * own[3], own[4] // 2, own[5] // 2] for own in fields],
    "form": lambda fields: [[*own[:2], "float16", *own[3:]] for own in fields],
}


def ids_of(content: bytes) -> list[int]:
    return np.frombuffer(content, np.int64, BLOCK, 16).tolist()


def decoded(content: bytes) -> StoredBlock:
    return decode_block(content, ids_of(content))


def poisoned(content: bytes, change: Callable[[Fields], Fields]) -> bytes:
    length, begin = int.from_bytes(content[12:16], "little"), 16 + 8 * BLOCK
    fields = json.loads(content[begin : begin + length])
    size = fields[0][1]
    changed = change(fields)
    text, data = json.dumps(changed).encode(), content[begin + length :]
    body = content[16:begin] + text + data[: size * len(changed)]
    head = block_codec.MAGIC + zlib.crc32(body).to_bytes(4, "little")
    return head + len(text).to_bytes(4, "little") + body


@pytest.mark.parametrize("kind", ["twice", "true", "fraction", "negative", "vast", "text"])
def test_layouts_that_are_none(kind: str) -> None:
    two = StoredBlock(
        {0: RowLayout("float32", 1, 2, 2), 1: RowLayout("float32", 1, 2, 2)}, [*block().rows] * 2
    )
    content = b"".join(encode_block(two, IDS))
    assert decode_block(poisoned(content, lambda fields: fields), IDS).layout == two.layout
    if kind == "vast":
        assert decode_block(poisoned(content, LAYOUTS[kind]), IDS).layout[0].heads == 1 << 70
        return  # a number like another; the cache compares it
    with pytest.raises(BlockError, match="has no layout"):
        decode_block(poisoned(content, LAYOUTS[kind]), IDS)


def test_a_poisoned_file_answers_nobody(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its layout is not the model's, though each number in it may be one; or its rows are no
    numbers."""
    memory = {"prefix_dir": str(tmp_path / "kept"), "kv_bits": 16}

    def ask(model: MoE, number: int) -> tuple[list[int], int]:
        prompt = [3 + (at * at + number) % 120 for at in range(BLOCK + 9)]
        engine = model.engine()
        group = model.request(prompt, GREEDY, "")
        engine.submit(group)
        while not engine.idle:
            engine.step()
        return group.sequences[0].token_ids, group.sequences[0].num_cached_tokens

    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory) as model:
        answers = [ask(model, number)[0] for number in range(len(LAYOUTS) + 2)]
    files = sorted((tmp_path / "kept").glob("*/*.kv"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == len(answers)
    for file, change in zip(files, LAYOUTS.values(), strict=False):  # the last stays as it is
        file.write_bytes(poisoned(file.read_bytes(), change))
    content = files[-2].read_bytes()
    rows = [torch.full_like(rows, 255) for rows in decoded(content).rows]
    files[-2].write_bytes(
        b"".join(encode_block(decoded(content)._replace(rows=rows), ids_of(content)))
    )
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory) as model:
        found = [ask(model, number) for number in range(len(answers))]
        assert model._prefixes is not None
        assert model._prefixes.store is not None
        assert model._prefixes.store.dropped_files == len(LAYOUTS) + 1
    assert [text for text, _ in found] == answers
    assert sorted(known for _, known in found) == [0] * (len(LAYOUTS) + 1) + [BLOCK]


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_rows_that_are_no_numbers_are_seen_in_each_precision(bits: int) -> None:
    memory, shape = HostBlocks(NativeKV(load_library()), KVFormat.of_bits(bits)), Shape(2, 32, 64)
    rows = memory.rows(memory.take({0: shape}), 0, shape)
    assert memory.are_finite(rows, shape)
    keys = 64 * 2 * memory.form.keys.row_bytes(32)
    for part in (rows[:keys], rows[keys : keys + 64 * 2 * memory.form.values.row_bytes(64)]):
        kept = part.clone()
        part.fill_(255)
        assert not memory.are_finite(rows, shape)
        part.copy_(kept)
    assert memory.are_finite(rows, shape)
