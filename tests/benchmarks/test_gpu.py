"""`make gpu` says what a machine lacks, and goes on where a run was cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_steps, gpu_tiles
from benchmarks.kernels_gpu import Size
from moe import MoE
from moe.loading.memory_plan import GIB


def test_the_first_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels.txt"
    wheels.write_text("# a comment\nnumpy>=1\nnumpy<1  # too new\nno-such-package-at-all>=2\n")
    monkeypatch.setattr(gpu, "WHEELS", wheels)
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "1", "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == gpu.LACKING
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("missing: numpy<1 (there is ")
    assert first.endswith("no-such-package-at-all>=2, a CUDA device that torch finds")
    assert len(json.loads(last)["missing"]) == 3
    assert not list(tmp_path.glob("*.json"))


def test_the_wheels_are_those_that_this_version_needs() -> None:
    """Whatever `moe` needs but torch, which an image has; at no lower version."""
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = [line for line in gpu.WHEELS.read_text().splitlines() if not line.startswith("#")]
    assert {one for one in project["dependencies"] if not one.startswith("torch>")} <= {*lines}
    assert not gpu.missing(lines, stand_in=True)


def test_a_run_goes_on_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def fake(name: str, stores: Path, limit: float, *, stand_in: bool) -> dict[str, Any]:
        ran.append(name)
        if name == fails:
            return {"error": "it broke", "seconds": 1.0}
        return {"rate": {"a": 1.5}, "seconds": 2.0}

    monkeypatch.setattr(gpu, "_in_a_process", fake)
    monkeypatch.setattr(gpu, "STEPS", {1: {"one": 10, "two": 10}, 2: {"three": 1000}})
    fails = "two"
    assert gpu.run_part(1, tmp_path, 60, tmp_path, stand_in=True) == gpu.FAILED
    (file,) = tmp_path.glob("*-gpu.json")
    page = file.with_suffix(".md").read_text()
    assert "- **one** (2.0 s)\n  - rate: a 1.5" in page
    assert "- **two**: failed after 1.0 s: it broke" in page
    assert "- **three**: not run" in page
    fails = ""
    assert gpu.run_part(1, tmp_path, 60, tmp_path, stand_in=True) == 0
    assert ran == ["one", "two", "two"]
    left = gpu.run_part(2, tmp_path, 60, tmp_path, stand_in=True)
    assert left == gpu.LEFT  # too little time is left
    assert ran == ["one", "two", "two"]


@pytest.mark.parametrize(
    ("fails", "code"), [("", 0), ("one", gpu.FAILED), ("two", gpu.FAILED), ("left", gpu.LEFT)]
)
def test_a_part_runs_whatever_became_of_those_before(
    fails: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def fake(name: str, stores: Path, limit: float, *, stand_in: bool) -> dict[str, Any]:
        ran.append(name)
        return {"seconds": 1.0} | ({"error": "it broke"} if name == fails else {})

    monkeypatch.setattr(gpu, "_in_a_process", fake)
    first = {"one": 10} | ({"long": 1000} if fails == "left" else {})
    monkeypatch.setattr(gpu, "STEPS", {1: first, 2: {"two": 10}})
    monkeypatch.setattr(sys, "argv", ["gpu", "--stand-in", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu, "missing", lambda *_, **__: [])
    assert gpu.main() == code
    assert ran == ["one", "two"]


def test_the_cache_says_how_often_it_had_an_expert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Short:
        """Loads with room for half of the experts."""

        @staticmethod
        def from_pretrained(store: Path, settings: dict[str, Any]) -> MoE:
            memory = settings["memory"] | {"reserve_gib": 0.0}
            fixed = {**settings, "prefill": {"wave_tokens": 128}}
            lines = MoE.from_pretrained(store, {**fixed, "memory": memory}).memory_plan.lines
            room = sum(line.bytes / (2 if line.name == "experts" else 1) for line in lines)
            memory |= {"device_gib": room / GIB}
            return MoE.from_pretrained(store, {**fixed, "memory": memory})

    monkeypatch.setattr(gpu_steps, "MoE", Short)
    found = gpu_steps.run_step("offload", tmp_path, stand_in=True)
    assert {name: 0 < way["hit_ratio"] <= 1 for name, way in found.items()} == {
        "copy on miss": True, "ours": True,
    }  # fmt: skip


@pytest.mark.deep
def test_every_step_has_code_and_logical_ranks_give_the_rows_of_one(tmp_path: Path) -> None:
    assert {name for part in gpu.STEPS.values() for name in part} == set(gpu_steps._STEPS)
    assert all(sum(part.values()) <= 1.5 * 300 for part in gpu.STEPS.values())
    found = gpu_steps.run_step("ranks", tmp_path, stand_in=True)
    assert found["4 ranks, 4 tokens"]["error"] <= 0.05 * found["4 ranks, 4 tokens"]["largest"]


def test_a_step_that_hangs_or_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.sys, "executable", "/bin/sh")
    failed = gpu._in_a_process("none", tmp_path, 5, stand_in=True)
    assert failed["error"]
    assert "not run" not in failed["error"]


@pytest.mark.deep
def test_all_tiles_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the interpreter: one or two of each list, and attention."""
    monkeypatch.setattr(gpu_tiles, "DECODE", gpu_tiles.DECODE[1:2])
    monkeypatch.setattr(gpu_tiles, "PREFILL", gpu_tiles.PREFILL[3:])  # one fits gate and up
    monkeypatch.setattr(gpu_tiles, "PLANES", gpu_tiles.PLANES[1:3])
    monkeypatch.setattr(gpu_tiles, "TALL", gpu_tiles.TALL[2:3])
    monkeypatch.setattr(gpu_tiles, "TOKENS", {"bf16": (2,), "planes": (2,)})
    size, device = Size(hidden=64, experts=4, width=64, top_k=1, layers=1), torch.device("cpu")
    made = list(gpu_tiles.variants(size, device, layers=1, prompts=[16]))
    gpu_tiles.compile_all(made)
    assert (
        len({(one.what, one.how) for one in made}) == len(made) == 2 * (2 + 2 + 2) + 3 + 2 * 2 + 2
    )


def test_what_overlaps_is_counted_once() -> None:
    assert gpu_steps.covered([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (1.5, 3.0)]) == 6.0
    assert gpu_steps.covered([]) == 0.0
