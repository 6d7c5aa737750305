"""A conversion that is killed, interrupted or out of disk: no half of a store, and it goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experts import safetensors_io as blobs
from experts.manifest import JOURNAL_NAME, MANIFEST_NAME
from moe import MoE
from moe.cli import main
from moe.commands.convert.convert import Journal, convert
from moe.errors import CheckpointError
from moe.loading.takeover import Takeover
from moe.settings import ModelSettings
from tests.moe.convert.stores import SETTINGS, content


class Killed(BaseException):
    """What no code of ours catches."""


def killing(function: Callable[[Tensor], memoryview], after: int) -> Callable[[Tensor], memoryview]:
    """The function, which works so many times."""
    left = after

    def count(tensor: Tensor) -> memoryview:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return function(tensor)

    return count


def test_an_interrupt_says_what_is_kept(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    assert main(["convert", str(path), str(tmp_path / "store")]) == 130
    work = tmp_path / "store.unfinished"
    assert capsys.readouterr().err.lstrip() == (
        f"moe: interrupted; finished files are kept in {work}, and the same command continues from "
        "there\n"
    )


@settings(max_examples=8)
@given(kills=st.lists(st.integers(0, 120), min_size=1, max_size=3))
def test_a_conversion_killed_anywhere_goes_on_to_the_same_bytes(
    path: Path,
    finished: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    """Killed when the n-th tensor is about to be written, then again, then not."""
    out = tmp_path_factory.mktemp("killed") / "store"
    for kill in kills:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs, "as_bytes", killing(blobs.as_bytes, kill))
            try:
                convert(path, out, SETTINGS)
            except Killed:
                assert not out.exists()
            else:
                break
    if not out.exists():
        convert(path, out, SETTINGS)
    assert content(out) == finished
    assert not out.with_name("store.unfinished").exists()


def half_done(path: Path, out: Path, patch: pytest.MonkeyPatch) -> Path:
    """A conversion that stopped after two layers."""
    write, done = blobs.write_file, 0

    def two(file: Path, *rest: Any) -> blobs.FileRecord:
        nonlocal done
        if done == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        done += 1
        return write(file, *rest)

    with patch.context() as inner:
        inner.setattr("experts.layer_file.write_file", two)
        message = r"cannot write .*00002\.safetensors: No space left.*continues from there"
        with pytest.raises(CheckpointError, match=message):
            convert(path, out, SETTINGS)
    return out.with_name(f"{out.name}.unfinished")


@pytest.mark.parametrize("synced", [0, 1, 3, 8, 12, 16, 17])
def test_a_disk_that_is_full_at_any_file_leaves_no_store_and_goes_on(
    path: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    synced: int,
) -> None:  # fmt: skip
    """Journal, layers, trunk, what is copied, manifest: whichever file cannot be finished."""
    fsync, out, left = os.fsync, tmp_path / "store", synced

    def full(fd: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*No space left on device; finished"
        ):
            convert(path, out, SETTINGS)
    assert not out.exists()
    work = out.with_name("store.unfinished")
    assert not [file for file in work.iterdir() if file.name.endswith(".unfinished")]
    assert content(convert(path, out, SETTINGS)) == finished


def test_where_nothing_can_be_written_nothing_is_said_to_be_kept(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^cannot write \S+: Not a directory$"):
        convert(path, tmp_path / "file" / "store", SETTINGS)


def test_finished_layers_are_not_read_again(
    path: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(path, tmp_path / "store", monkeypatch)
    assert sorted(content(work)) == [
        JOURNAL_NAME, "experts-00000.safetensors", "experts-00001.safetensors",
    ]  # fmt: skip
    taken: list[int] = []
    take = Takeover.__call__

    def spy(self: Takeover, name: str) -> None:
        taken.append(name.count(".mlp.experts"))
        take(self, name)

    monkeypatch.setattr(Takeover, "__call__", spy)
    convert(path, tmp_path / "store", SETTINGS)
    assert sum(taken) == 2  # of four layers
    assert content(tmp_path / "store") == finished


def test_a_damaged_layer_is_made_again(
    path: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(path, tmp_path / "store", monkeypatch)
    file = work / "experts-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with (work / JOURNAL_NAME).open("a") as journal:
        journal.write('{"layer": {"torn')
    convert(path, tmp_path / "store", SETTINGS)
    assert content(tmp_path / "store") == finished


def test_what_a_kill_leaves_is_neither_lost_nor_taken_over(
    path: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes a file, and again when it has begun to go on."""
    work = half_done(path, tmp_path / "store", monkeypatch)
    journal = (work / JOURNAL_NAME).read_bytes()
    for name in (f"{MANIFEST_NAME}.0.unfinished", "experts-00002.safetensors.unfinished"):
        (work / name).write_bytes(b"x")

    def kill(_: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", kill)
        with pytest.raises(Killed):
            convert(path, tmp_path / "store", SETTINGS)
    assert (work / JOURNAL_NAME).read_bytes() == journal
    assert content(convert(path, tmp_path / "store", SETTINGS)) == finished


def test_other_settings_start_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(path, tmp_path / "store", monkeypatch)
    other = ModelSettings(expert_bits=4)
    expected = content(convert(path, tmp_path / "direct", other))
    assert content(convert(path, tmp_path / "store", other)) == expected


def test_an_unfinished_store_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(path, tmp_path / "store", monkeypatch)
    shutil.copy(path / "config.json", work)
    with pytest.raises(CheckpointError, match=r"has no moe-store\.json: its conversion did not"):
        MoE.from_pretrained(work)


def test_two_conversions_at_once(path: Path, tmp_path: Path) -> None:
    work = tmp_path / "store.unfinished"
    work.mkdir()
    with Journal(work, {}), pytest.raises(CheckpointError, match="another process is converting"):
        convert(path, tmp_path / "store", SETTINGS)
