"""`moe plan` and `moe run` measure this machine once a day, and a model once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from examples.models.random_store import write_random_store
from moe.cache_dir import files, trials
from moe.commands.plan import speeds
from moe.commands.plan.command import SpeedPlan, plan_speed, sentences
from moe.commands.plan.rank_command import plan_many
from moe.commands.plan.speeds import MachineSpeeds
from moe.commands.run import choice, facts
from moe.commands.run.command import plan_run
from moe.loading.memory_plan import GIB
from moe.memory import footprint, planning
from moe.settings.profile import load_profile

CPU = torch.device("cpu")
FEW = {"memory.kv_tokens": 64, "prefill.wave_tokens": 64, "memory.reserve_gib": 0.0}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trials, "is_busy", lambda: False)
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Counter[str]:
    """How often each thing has been measured, with little work."""
    counts = Counter[str]()

    def counted(where: Any, name: str) -> None:
        measure = getattr(where, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return measure(*args, **kwargs)

        monkeypatch.setattr(where, name, count)

    monkeypatch.setattr(speeds, "SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(speeds, "CACHE_SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(speeds, "MEASURE_S", 0.0)
    for name in ("memory_speed", "_experts_speed", "product_speed", "disk_speed", "measure_link"):
        counted(speeds, name)
    counted(footprint, "_measured")
    # Tests share footprints (tests/conftest.py).
    monkeypatch.setattr(planning, "measure_footprint", footprint.measure_footprint)
    return counts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, dtype=torch.bfloat16,
    )  # fmt: skip
    return write_random_store(config, tmp_path_factory.mktemp("plan") / "store")


def planned(path: Path, **overrides: Any) -> SpeedPlan:
    return plan_speed(path, load_profile(overrides=FEW | overrides))


@pytest.fixture
def half(store: Path) -> dict[str, Any]:
    """The setting that leaves memory for half of the experts."""
    lines = {line.name: line.bytes for line in planned(store).memory.lines}
    return {"memory.device_gib": (sum(lines.values()) - lines["experts"] / 2) / GIB}


def test_the_second_plan_measures_nothing(
    store: Path, half: dict[str, Any], measured: Counter[str], directory: Path
) -> None:
    files.forget()
    measured.clear()
    first = planned(store, **half)
    assert {"_experts_speed": 1, "disk_speed": 1}.items() <= measured.items()
    assert measured["_measured"]
    before = measured.copy()
    second = planned(store, **half)
    assert measured == before
    assert (first.speeds, first.memory) == (second.speeds, second.memory)
    assert first.measured == "now"
    assert second.measured.startswith("20")
    assert f"Measured {second.measured}: memory" in " ".join(sentences(second))
    anew = planned(store, **half, **{"model.proof_cache": False})
    assert anew.measured == "now"
    assert measured["disk_speed"] == 2


def test_a_plan_of_ranks_measures_nothing_twice(store: Path, measured: Counter[str]) -> None:
    def plan() -> None:
        plan_many(store, load_profile(), 2, 1, None, speeds.given_link("1,50", "--network"))

    plan()
    assert {"memory_speed": 1, "product_speed": 1, "measure_link": 1}.items() <= measured.items()
    before = measured.copy()
    plan()
    assert measured == before


def test_run_measures_nothing_twice(
    tiny_checkpoint: Callable[[str], Path],
    measured: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "SMALL", {"checkpoint": 0, "GGUF file": 0})
    monkeypatch.setattr(facts, "cache_root", lambda: tmp_path / "stores")
    name = str(tiny_checkpoint("qwen3_moe"))
    first = plan_run(name, {})
    assert sum(measured.values()) == 1 + measured["_measured"]
    assert measured["_measured"] >= 2  # passes of prompts as for the checkpoint, and for a store
    before = measured.copy()
    assert plan_run(name, {}).speed == first.speed
    assert measured == before


@pytest.mark.parametrize("kind", ["planes", "disk"])
def test_another_subject_is_measured_anew(
    kind: str, measured: Counter[str], tmp_path: Path
) -> None:
    """Weights of other widths, reads of other sizes."""
    machine = MachineSpeeds(CPU, keep=True)
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    for size, count in ((4, 1), (4, 1), (8, 2), (4, 2)):
        if kind == "planes":
            machine.steps(size)
            assert measured["_experts_speed"] == count
        else:
            machine.disk(tmp_path / "file", size << 12)
            assert measured["disk_speed"] == count
    assert machine.since
