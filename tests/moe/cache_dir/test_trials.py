"""Trials of this machine: kept for a day, for one device, one start and one code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny import tiny_model
from experts.manifest import read_manifest
from moe import MoE
from moe.cache_dir import files, trials
from moe.cache_dir.trials import FRESH_S, Trials
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.machine import boot, mount_of
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, slot_bytes
from offload.readers import choice

NOON = 1_795_867_200.0


class Machine:
    """A figure that is another one each time it is measured, and the time of day."""

    def __init__(self) -> None:
        self.measured, self.now = 0, NOON

    def time(self) -> float:
        return self.now

    def speed(self) -> float:
        self.measured += 1
        return float(self.measured)

    def ask(self, about: object = "disk", keep: bool = True) -> float:
        return Trials(keep).recall("speed", about, float, self.speed, Path(__file__)).value


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trials, "is_busy", lambda: False)
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(files.time, "time", made.time)
    return made


def test_a_trial_is_kept_for_a_day(machine: Machine) -> None:
    assert [machine.ask(), machine.ask()] == [1.0, 1.0]
    machine.now += FRESH_S - 1
    assert machine.ask() == 1.0
    found = Trials().recall("speed", "disk", float, machine.speed, Path(__file__))
    assert found.since.startswith("2026-11-2")
    machine.now += 1
    assert [machine.ask(), machine.ask()] == [2.0, 2.0]
    machine.now = NOON  # a clock that was set back
    assert machine.ask() == 3.0


CHANGES = {
    "device": ("trials.mount_of", lambda _: ["66", "8:2 / /mnt ext4 /dev/sdb"]),
    "start": ("trials.boot", lambda: "another"),
    "code": ("files.code_digest", lambda: "another"),
    "processor": ("files._processor", lambda _: ["another"]),
    "library": ("files._version", lambda name: f"{name} of tomorrow"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_measures_anew(
    what: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.ask() == 1.0
    with monkeypatch.context() as patch:
        name, changed = CHANGES[what]
        patch.setattr(f"moe.cache_dir.{name}", changed)
        assert machine.ask() == 2.0
    assert machine.ask() == 1.0
    assert machine.ask("another subject") == 3.0


def test_a_figure_of_a_busy_machine_is_not_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trials, "is_busy", lambda: True)
        assert [machine.ask(), machine.ask()] == [1.0, 2.0]
    assert [machine.ask(), machine.ask()] == [3.0, 3.0]


def test_without_a_directory_each_trial_is_made(
    machine: Machine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [machine.ask(keep=False), machine.ask(keep=False)] == [1.0, 2.0]
    assert not directory.exists()
    monkeypatch.setattr(trials, "is_busy", lambda: False)
    monkeypatch.setenv(files.ENVIRONMENT, "")
    assert [machine.ask(), machine.ask()] == [3.0, 4.0]


@pytest.mark.parametrize("content", [{}, {"figure": "fast"}, {"figure": None}], ids=str)
def test_a_figure_of_another_kind_is_measured_anew(
    content: dict[str, Any], machine: Machine, directory: Path
) -> None:
    assert machine.ask() == 1.0
    (file,) = directory.iterdir()
    files.write(file, file.stem.removeprefix("trial-"), content)
    assert [machine.ask(), machine.ask()] == [2.0, 2.0]


def test_files_of_one_device_lie_on_one_mount(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    place = tmp_path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    number = str(tmp_path.stat().st_dev)
    assert mount_of(tmp_path, root) == [number]  # the system does not say more
    line = f"36 35 8:1 / {place} rw,noatime shared:1 - ext4 /dev/sda1 rw"
    other = "37 35 8:2 / /elsewhere rw - xfs /dev/sdb rw"
    (root / "proc/self/mountinfo").write_text(f"{line}\n{other}\n")
    told = f"8:1 {place} rw,noatime ext4 /dev/sda1 rw"
    assert mount_of(tmp_path, root) == [number, told]
    (tmp_path / "link").symlink_to(root)
    assert mount_of(tmp_path / "link", root) == mount_of(root, root)
    assert boot(root) == ""


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store, and a profile whose memory holds half of its experts."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe").save_pretrained(path / "source")
    convert(path / "source", path / "store", ModelSettings(expert_bits=4))
    asked: dict[str, Any] = {
        "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
        "prefill": {"wave_tokens": 128, "mode": "whole"},
        "engine": {"max_batch_size": 8},
        "offload": {"hot_set": False},
    }
    with MoE.from_pretrained(path / "store", asked) as resident:
        rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    manifest = read_manifest(path / "store")
    slots = sum(layer.experts for layer in manifest.layers) // 2
    room = rest + slots * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
    return path / "store", asked | {"memory": asked["memory"] | {"device_gib": room / GIB}}


def test_a_second_load_tries_no_reader(
    offloaded: tuple[Path, dict[str, Any]],
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, profile = offloaded
    measured: list[Path] = []

    def measure(_reader: object, _fd: int, file: Path, _samples: object) -> float:
        measured.append(file)
        return 2e9

    monkeypatch.setattr(choice, "_bytes_per_second", measure)

    def load(path: Path = store, **changed: Any) -> tuple[str, int]:
        """Why the reader was taken, and how many trials there were."""
        measured.clear()
        with MoE.from_pretrained(path, profile | changed) as model:
            return model.status()["offload"]["reader"]["reason"], len(measured)

    first, second = load(), load()
    assert (first[1], second[1]) == (1, 0)
    assert first[0].startswith("threads with O_DIRECT 2.00 GB/s")
    assert second[0].startswith("threads with O_DIRECT 2.00 GB/s; measured on 20")
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    assert load(copy)[1] == 0  # another model of the same device
    assert load(model={"proof_cache": False}) == (first[0], 1)
    assert load(offload=profile["offload"] | {"reader": "buffered"})[1] == 1
    with monkeypatch.context() as patch:
        patch.setattr(trials, "mount_of", lambda _: ["another device"])
        assert [load()[1], load()[1]] == [1, 0]
    now: Callable[[], float] = trials.time.time
    monkeypatch.setattr(trials.time, "time", lambda: now() + FRESH_S)
    assert [load()[1], load()[1]] == [1, 0]
