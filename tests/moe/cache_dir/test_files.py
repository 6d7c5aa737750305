"""Kept files: whole or absent, whoever writes them and wherever there is no room."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from examples.models.tiny import tiny_model
from moe.cache_dir import files
from moe.cache_dir.proofs import proof_key
from moe.settings.profile import load_profile


def test_a_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key.json"
    files.write(file, "key", {"first": 1})

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    files.write(file, "key", {"second": 2})
    found = files.read(file, "key")
    assert found is not None
    assert found.content == {"first": 1}
    assert [*tmp_path.iterdir()] == [file]


def test_a_directory_that_cannot_be_made_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "file" / "kept"))
    assert files.private_directory() is None
    assert files.forget() == 0


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    file, start = tmp_path / "key.json", Barrier(4)

    def write(writer: int) -> None:
        start.wait()
        for turn in range(10):
            files.write(file, "key", {"writer": [writer] * (100 * turn + 1)})
            found = files.read(file, "key")
            assert found is not None
            assert len(set(found.content["writer"])) == 1

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(write, range(4))]
    assert [*tmp_path.iterdir()] == [file]


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / "a.json.1.unfinished", tmp_path / "a.json.2.unfinished"
    for file in (old, new):
        file.write_text("half")
    os.utime(old, (0, 0))
    files.write(tmp_path / "b.json", "key", {})
    assert {file.name for file in tmp_path.iterdir()} == {"b.json", new.name}


@pytest.mark.parametrize("name", ["MOE_CPU_KERNEL", "OMP_NUM_THREADS", "TRITON_INTERPRET"])
def test_variables_that_choose_kernels_are_surroundings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "choose_kernel", lambda: (None, ""))  # else it compiles
    before = files.digest_of(files.surroundings())
    monkeypatch.setenv(name, "another")
    assert files.digest_of(files.surroundings()) != before


def test_the_setting_of_kernels_gives_another_key(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    keys = {
        proof_key(tmp_path, load_profile(None, {"kernels.backend": backend}).profile)
        for backend in ("auto", "triton", "reference")
    }
    assert len(keys) == 3
