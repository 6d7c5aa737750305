"""Which reader is taken, why, and DeepSpeed's reads behind the same interface."""

from __future__ import annotations

import importlib.util
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.readers import choice, choose_reader, deepspeed
from offload.readers.deepspeed import BLOCK_BYTES, DeepSpeedReads, load_deepspeed
from offload.readers.direct_io import DirectFiles
from offload.readers.pieces import PIECE_BYTES
from offload.transfer import Read


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "experts.bin"
    path.write_bytes(os.urandom(2 * PIECE_BYTES) + b"tail")
    return path


class FakeDeepSpeed:
    """Reads as DeepSpeed does: errors are not reported, the buffer just stays as it was."""

    failing: tuple[int, ...] = ()
    freed = 0

    def aio_handle(self, *arguments: object) -> FakeDeepSpeed:
        assert arguments[0] == BLOCK_BYTES
        assert arguments[4] == 1
        return self

    def new_cpu_locked_tensor(self, count: int, example: Tensor) -> Tensor:
        room = torch.zeros(count + 4096, dtype=example.dtype)
        return room[-room.data_ptr() % 4096 :][:count]

    def free_cpu_locked_tensor(self, tensor: Tensor) -> None:
        self.freed += 1

    def pread(self, buffer: Tensor, path: str, validate: bool, later: bool, offset: int) -> int:
        assert not validate
        assert not later
        assert offset % 4096 == len(buffer) % 4096 == 0
        with open(path, "rb") as opened:
            assert offset + len(buffer) <= os.fstat(opened.fileno()).st_size
            for index, start in enumerate(range(0, len(buffer), BLOCK_BYTES)):
                block = memoryview(buffer[start : start + BLOCK_BYTES].numpy())  # type: ignore[arg-type]
                if index not in self.failing:
                    opened.seek(offset + start)
                    opened.readinto(block)
        return 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeDeepSpeed:
    module = FakeDeepSpeed()
    monkeypatch.setattr(choice, "load_deepspeed", lambda threads, build: (module, ""))
    return module


@pytest.mark.parametrize("failing", [(), (0,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, PIECE_BYTES), (4096, 8192), (100, 5000), (PIECE_BYTES, PIECE_BYTES + 4)],
)
def test_deepspeeds_reads_bring_the_bytes_even_where_it_fails(
    module: FakeDeepSpeed, file: Path, failing: tuple[int, ...], offset: int, nbytes: int
) -> None:
    module.failing = failing
    reader = choose_reader(file, "deepspeed")
    assert reader.name == "DeepSpeed's asynchronous reads"
    place = torch.zeros(nbytes, dtype=torch.uint8)
    with file.open("rb") as opened:
        reader.submit([Read(opened.fileno(), file, offset, place)], urgent=True).wait()
        opened.seek(offset)
        assert bytes(place.numpy()) == opened.read(nbytes)
    reader.close()


def test_deepspeeds_failure_is_found_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain read that follows a missing mark says what is wrong."""
    module, files = FakeDeepSpeed(), DirectFiles()
    module.failing = (2,)
    way = DeepSpeedReads(module, files)

    def broken(fd: int, views: object, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    place = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    with file.open("rb") as opened, pytest.raises(OSError, match="Input/output"):
        way.read(opened.fileno(), 0, [memoryview(place.numpy())])  # type: ignore[arg-type]
    del way
    assert module.freed == 1
    files.close()


def test_the_fastest_is_taken_and_the_figures_are_told(
    module: FakeDeepSpeed, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"threads with O_DIRECT": 1e9, "DeepSpeed's asynchronous reads": 2e9}
    monkeypatch.setattr(choice, "_bytes_per_second", lambda reader, *_: speeds[reader.name])
    reader = choose_reader(file)
    assert reader.name == "DeepSpeed's asynchronous reads"
    assert reader.reason == (
        "DeepSpeed's asynchronous reads 2.00 GB/s, threads with O_DIRECT 1.00 GB/s"
    )
    reader.close()
    speeds["threads with O_DIRECT"] = 2e9  # a tie goes to the one that reports its errors
    reader = choose_reader(file)
    assert reader.name == "threads with O_DIRECT"
    assert reader.bytes_per_second == 2e9
    reader.close()


def test_without_o_direct_the_page_cache_is_used_and_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectFiles, "get", lambda *_: None)
    reader = choose_reader(file)
    assert reader.name == "threads through the page cache"
    assert "this file system has no O_DIRECT" in reader.reason
    assert reader.bytes_per_second > 0
    reader.close()
    with pytest.raises(OffloadError, match=r"'direct' is not available: this file system has no O"):
        choose_reader(file, "direct")


def test_what_cannot_be_had_says_why(tmp_path: Path, file: Path, monkeypatch: Any) -> None:
    with pytest.raises(OffloadError, match=r"cannot read .*absent: No such file"):
        choose_reader(tmp_path / "absent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OffloadError, match="'deepspeed' is not available: DeepSpeed is not inst"):
        choose_reader(file, "deepspeed")
    reader = choose_reader(file)
    assert "DeepSpeed is not installed" in reader.reason
    reader.close()


def test_a_small_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x")
    reader = choose_reader(path)
    assert reader.bytes_per_second == 0
    reader.close()


def test_what_would_end_the_process_in_deepspeed_is_tried_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(deepspeed.ctypes.util, "find_library", lambda name: None)
    assert load_deepspeed(4, build=True) == (
        None,
        "libaio is not installed, which DeepSpeed's reads need",
    )
    monkeypatch.setattr(deepspeed, "_no_libaio", lambda: "")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert "`ulimit -l` allows 65536 bytes" in load_deepspeed(4, build=True)[1]


def test_a_build_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("Error building extension 'async_io'\nand much more")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(deepspeed, "_no_libaio", lambda: "")
    monkeypatch.setattr(deepspeed, "_no_locked_memory", lambda needed: "")
    monkeypatch.setattr(deepspeed.importlib, "import_module", broken)
    assert load_deepspeed(4, build=True) == (
        None,
        "DeepSpeed's reads cannot be built: Error building extension 'async_io'",
    )
    monkeypatch.setattr(deepspeed, "_is_built", lambda: False)
    assert "are not compiled" in load_deepspeed(4, build=False)[1]
