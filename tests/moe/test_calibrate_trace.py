"""Traces: what the seam saw, with bounded memory, and files that are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.fit import find_gates
from moe.commands.calibrate.record import record_trace
from moe.errors import CalibrationError
from routing.predict.ensemble import floats

WINDOWS = [list(range(1, 21)), list(range(30, 37)), [5]]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoehybrid"])
def test_a_trace_is_what_each_window_does_alone(
    tiny_moe: Callable[[str], MoE], model_type: str
) -> None:
    model = tiny_moe(model_type)
    trace = record_trace(model.backbone, model.experts, WINDOWS)
    assert trace.lengths == [20, 7, 1]
    for (tokens, layers), window in zip(trace.sequences(), WINDOWS, strict=True):
        assert tokens.tolist() == window
        alone = record_trace(model.backbone, model.experts, [window])
        for own, theirs in zip(alone.expert_ids, layers, strict=True):
            assert torch.equal(own, theirs)
    assert trace.contexts(2)[[0, 1, 20, 27]].tolist() == [[-1, 1], [1, 2], [-1, 30], [-1, 5]]


def test_kept_rows_fit_their_budget_and_belong_to_their_tokens(
    tiny_moe: Callable[[str], MoE],
) -> None:
    model = tiny_moe("qwen3_moe")
    whole = record_trace(model.backbone, model.experts, WINDOWS).rows
    assert whole is not None
    assert whole.tokens.tolist() == list(range(28))
    layers, hidden = len(whole.expert_inputs), whole.expert_inputs[0].shape[1]
    budget = 10 * layers * hidden * 2
    few = record_trace(model.backbone, model.experts, WINDOWS, row_bytes=budget).rows
    assert few is not None
    assert len(few.tokens) == 10
    for own, theirs in zip(few.expert_inputs, whole.expert_inputs, strict=True):
        assert torch.equal(own, theirs[few.tokens])
    assert record_trace(model.backbone, model.experts, WINDOWS, row_bytes=0).rows is None


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe"])
def test_gates_that_are_found_choose_as_the_routers_do(
    tiny_moe: Callable[[str], MoE], model_type: str
) -> None:
    model = tiny_moe(model_type)
    trace = record_trace(model.backbone, model.experts, WINDOWS)
    assert trace.rows is not None
    found = find_gates(model.backbone)
    assert len(found) == len(trace.num_experts)
    for layer, one in enumerate(found):
        assert one.gate is not None, one.reason
        chosen = one.gate.choose(floats(trace.rows.expert_inputs[layer]))
        assert (chosen == trace.expert_ids[layer].numpy()).all(-1).mean() > 0.9


@pytest.fixture
def saved(tiny_moe: Callable[[str], MoE], tmp_path: Path) -> Path:
    model = tiny_moe("qwen3_moe")
    record_trace(model.backbone, model.experts, WINDOWS).save(tmp_path / "trace")
    return tmp_path / "trace"


def test_a_saved_trace_comes_back(saved: Path, tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    trace, loaded = record_trace(model.backbone, model.experts, WINDOWS), Trace.load(saved)
    assert torch.equal(loaded.token_ids, trace.token_ids)
    assert (loaded.lengths, loaded.num_experts) == (trace.lengths, trace.num_experts)
    for ours, theirs in zip(
        loaded.expert_ids + loaded.weights, trace.expert_ids + trace.weights, strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([20, 7])}, "holds 28 tokens, but its sequences add up to 27"),
        ({"expert_ids.1": None}, "is no whole trace: 'expert_ids.1' is missing"),
        ({"expert_ids.0": torch.full((28, 2), 8)}, "layer 0 names experts beyond 8"),
        (
            {"weights.2": torch.zeros(3, 2)},
            r"layer 2 has expert ids \(28, 2\) and weights \(3, 2\)",
        ),
    ],
)
def test_traces_that_are_not_right(
    saved: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = load_file(saved) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, saved, {"moe_trace": "1", "num_experts": ",".join(["8"] * 4)})
    with pytest.raises(CalibrationError, match=message):
        Trace.load(saved)


def test_files_that_are_no_traces(saved: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, saved)
    with pytest.raises(CalibrationError, match="trace version None, this program reads version 1"):
        Trace.load(saved)
    (tmp_path / "text").write_text("no")
    with pytest.raises(CalibrationError, match="cannot be read as a trace"):
        Trace.load(tmp_path / "text")
    with pytest.raises(CalibrationError, match="cannot be read as a trace"):
        Trace.load(tmp_path / "absent")
