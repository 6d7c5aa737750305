"""Routers that follow what compressed experts do to their rows; conversions killed on the way."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from experts.manifest import TRUNK_NAME
from moe import MoE
from moe.calibration.files import (
    MANIFEST_FILE,
    TRACE_FILE,
    CalibrationManifest,
    SavedRouterRule,
    fingerprint,
)
from moe.calibration.trace import Trace
from moe.cli import main
from moe.commands.calibrate.compression import analyse, layer_path
from moe.commands.calibrate.record import record_trace
from moe.commands.convert import convert
from moe.commands.convert.bit_allocation import BitBudget
from moe.commands.convert.repair import repaired
from moe.errors import CalibrationError
from moe.settings import ModelSettings

SETTINGS = ModelSettings(group_size=32, trunk_bits=16, head_bits=16)
BUDGET = BitBudget(bits=3.4)

DEADLY = """
import os, signal, sys
from moe.commands.convert import convert
write = convert.write_layer
def deadly(work, index, *rest):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(work, index, *rest)
convert.write_layer = deadly
from moe.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def folder(model: MoE, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration without predictors, which nobody reads here."""
    path = tmp_path_factory.mktemp("calibration")
    analyse(model, trace, path, read_tokens=100, group_size=32)
    trace.save(path / TRACE_FILE)
    rule = dict.fromkeys(("top_k", "groups", "groups_kept"), 1)
    rules = [SavedRouterRule(**rule, score="softmax", group_score="max") for _ in trace.num_experts]
    about = CalibrationManifest(
        model=fingerprint(model.config),
        architecture="",
        text="",
        tokens=trace.num_tokens,
        vocabulary=1,
        num_experts=tuple(trace.num_experts),
        rules=tuple(rules),
        unavailable={},
        made_by={},
        files={},
    )
    (path / MANIFEST_FILE).write_text(about.model_dump_json())
    return path


@given(seed=st.integers(0, 2**31), hidden=st.sampled_from([1, 5, 24]))
def test_a_linear_change_of_the_rows_is_undone(seed: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(400, hidden, generator=generator)
    change = torch.eye(hidden) + 0.1 * torch.randn(hidden, hidden, generator=generator)
    weight = torch.randn(6, hidden, generator=generator)
    after = before @ change.T
    logits = before @ weight.T
    old, new = (
        (after @ own.T - logits).square().mean()
        for own in (weight, repaired(weight, before, after))
    )
    assert new <= 0.01 * old + 1e-6


def test_rows_that_have_not_moved_change_nothing() -> None:
    rows, weight = torch.randn(50, 8), torch.randn(4, 8).bfloat16()
    same = repaired(weight, rows, rows)
    assert same.dtype == torch.bfloat16
    assert torch.equal(same, weight)
    assert torch.equal(repaired(weight, torch.zeros(3, 8), torch.zeros(3, 8)), weight)


def trunk_of(store: Path) -> dict[str, torch.Tensor]:
    return load_file(store / TRUNK_NAME)


def test_repaired_routers_are_in_the_store(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = itertools.count(0.99, 1e-4)  # whatever comes later is better
    monkeypatch.setattr("moe.commands.convert.repair.agreement", lambda *_: next(shares))
    notices: list[str] = []
    own: dict[str, Any] = {"calibration": folder, "budget": BUDGET}
    old = trunk_of(convert.convert(path, tmp_path / "old", SETTINGS, **own))
    store = convert.convert(
        path, tmp_path / "new", SETTINGS, **own, repair=True, on_notice=notices.append
    )
    new = trunk_of(store)
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    # nothing before the first router moved
    assert moved == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}
    assert [notice[:22] for notice in notices] == [f"router of MoE layer {i}:" for i in range(4)]
    assert notices[0].endswith("99.01% of the original's experts are chosen, 99.02% repaired")
    router = MoE.from_pretrained(store).backbone.model.get_parameter(
        "model.layers.1.mlp.gate.weight"
    )
    assert torch.equal(router, new["model.layers.1.mlp.gate.weight"].float())


def test_routers_that_would_choose_worse_stay(path: Path, folder: Path, tmp_path: Path) -> None:
    """A random model's errors are noise, which no router can follow."""
    notices: list[str] = []
    own: dict[str, Any] = {"calibration": folder, "budget": BUDGET}
    convert.convert(path, tmp_path / "s", SETTINGS, **own, repair=True, on_notice=notices.append)
    assert "100.00% of the original's experts are chosen, 100.00% repaired" in notices[0]
    for notice in notices[1:]:
        if "repaired" in notice:
            before, after = (float(part.split("%")[0].split()[-1]) for part in notice.split(", "))
            assert before <= after
        else:
            assert "left as it is: new weights would choose worse (" in notice


def test_what_cannot_be_repaired(path: Path, folder: Path, tmp_path: Path, model: MoE) -> None:
    with pytest.raises(CalibrationError, match="repairing routers needs a calibration: run moe"):
        convert.convert(path, tmp_path / "s", SETTINGS, repair=True)
    other = record_trace(model.backbone, model.experts, [list(range(100))] * 20)
    other.save(folder / TRACE_FILE)
    with pytest.raises(CalibrationError, match="has 2000 rows that are not those of the trace"):
        convert.convert(path, tmp_path / "s", SETTINGS, calibration=folder, repair=True)
    assert not (tmp_path / "s").exists()
    layer_path(folder, 3).unlink()
    with pytest.raises(CalibrationError, match="run moe calibrate MODEL --text FILE --compr"):
        convert.convert(path, tmp_path / "s", SETTINGS, calibration=folder, repair=True)


def content(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.iterdir()}


@pytest.mark.deep
def test_a_killed_conversion_under_a_budget_goes_on(
    path: Path, folder: Path, launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself is killed, by the system, between two layers."""

    def command(out: str) -> list[str]:
        budget = ["--calibration", str(folder), "--target-bits", "5.5", "--group-size", "32"]
        return ["convert", str(path), str(tmp_path / out), *budget, "--repair-routers"]

    script = tmp_path / "deadly.py"
    script.write_text(DEADLY)
    with launch(1, [script, *command("killed")]) as killed:
        assert killed.codes() == [-signal.SIGKILL], killed.everything()
    assert not (tmp_path / "killed").exists()
    assert main(command("whole")) == 0
    written: list[int] = []
    write = convert.write_layer

    def spy(work: Path, index: int, *rest: Any) -> Any:
        written.append(index)
        return write(work, index, *rest)

    monkeypatch.setattr(convert, "write_layer", spy)
    assert main(command("killed")) == 0
    assert written == [2, 3]
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
