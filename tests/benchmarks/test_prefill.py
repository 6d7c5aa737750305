"""The prefill benchmark's model of costs, and one small point of its sweep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefill import Run, random_tokens
from benchmarks.prefill_cost import Machine, Part, Shape, bounds, parts_of, predicted_loads
from benchmarks.prefill_modes import MODES, Figures, savings
from examples.models.random_models import bench_dir, without_end
from moe import MoE
from moe.engine.prefill_mode import LayerWork, choose_prefill
from moe.settings import PrefillSettings

SHAPE = Shape(
    layers=2,
    work=LayerWork(backbone=4, pair=1, expert=5, top_k=2),
    expert_bytes=100,
    trunk_bytes=50,
    head_operations=7,
)
EVEN = [np.full(4, 0.25), np.full(4, 0.25)]  # four experts, one for each token


@given(
    st.sampled_from(MODES),
    st.integers(1, 5000),
    st.integers(0, 20),
    st.integers(32, 600),
    st.integers(1, 24),
)
def test_every_mode_reads_every_token_in_every_layer(
    mode: str, prompt: int, decoding: int, chunk: int, layers: int
) -> None:
    parts = parts_of(mode, prompt, decoding, chunk, EVEN[:1] * layers, SHAPE.work)
    assert sum(part.tokens * part.experts for part in parts) == prompt * layers
    assert sum(part.tokens * part.attentions for part in parts) == prompt * layers
    pairs = sum(part.pairs * part.attentions for part in parts)
    assert pairs == pytest.approx(prompt**2 / 2 * layers)
    if mode == "chunked":
        assert max(part.tokens for part in parts) + decoding <= chunk


@pytest.mark.parametrize("mode", ["chunked", "layered"])
@pytest.mark.parametrize("decoding", [1, 4, 16])
def test_predicted_loads_are_those_that_the_engine_chooses_by(mode: str, decoding: int) -> None:
    frequencies = [np.linspace(0.01, 0.2, 16) for _ in range(6)]
    settings = PrefillSettings(chunk_tokens=64, group_tokens=64)
    choice = choose_prefill(settings, frequencies, SHAPE.work, 200, decoding)
    expected = choice.chunked_loads if mode == "chunked" else choice.layered_loads
    parts = parts_of(mode, 200, decoding, 64, frequencies, SHAPE.work)
    assert predicted_loads(frequencies, parts, decoding) == pytest.approx(expected)


def test_a_step_is_bound_by_bytes_or_by_operations() -> None:
    parts = [Part(0, 10, 2, 2), Part(10, 12, 2, 2)]
    loads = 2 * 4 * (1 - 0.75**11), 2 * 4 * (1 - 0.75**3)
    read = [100 * count + 50 for count in loads]
    operations = [22 * 14 + 2 * 50 + 7, 6 * 14 + 2 * 22 + 7]
    slow_memory = bounds(SHAPE, Machine(1, 1e9), EVEN, parts, decoding=1)
    assert slow_memory["ttft_s"] == pytest.approx(sum(read))
    assert slow_memory["longest_step_s"] == pytest.approx(max(read))
    assert slow_memory["bytes"] == pytest.approx(sum(read))
    slow_arithmetic = bounds(SHAPE, Machine(1e9, 1), EVEN, parts, decoding=1)
    assert slow_arithmetic["ttft_s"] == pytest.approx(sum(operations))
    assert slow_arithmetic["operations"] == sum(operations)


def test_savings_compare_layered_with_chunked() -> None:
    modes = {
        "layered": {"expert_loads": 30, "predicted_loads": 25.0},
        "chunked": {"expert_loads": 40, "predicted_loads": 50.0},
    }
    assert savings(modes) == {"predicted_saving": 0.5, "measured_saving": 0.25}


def test_figures_of_several_points_are_pooled() -> None:
    one = Figures([1.0], [0.1], [2.0], loads=5, bytes_read=50, predicted_loads=4.0)
    two = Figures([3.0], [0.3], [4.0], loads=1, bytes_read=10, stalled_steps=1)
    pooled = Figures.together([one, two]).summary()
    assert pooled["ttft_p50_s"] == 2.0
    assert (pooled["expert_loads"], pooled["expert_bytes"]) == (6, 60)
    assert (pooled["predicted_loads"], pooled["stalled_steps"]) == (4.0, 1)


def test_a_point_of_the_sweep(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    run = Run(model, Machine(1e9, 1e9), 16, prompts=2, make_prompt=random_tokens(model))
    point, figures = run.point(length=40, decoding=2)
    json.dumps(point)
    layers, experts = len(model.stats()["layers"]), model.config.num_experts
    for mode in MODES:
        assert len(figures[mode].ttft_s) == 2
        assert 0 < point[mode]["expert_loads"] <= 2 * layers * experts * 3  # steps
        assert point[mode]["least"]["longest_step_s"] <= point[mode]["least"]["ttft_s"]
    assert point["layered"]["stalled_steps"] == point["chunked"]["stalled_steps"] == 0
    assert point["whole"]["expert_loads"] <= point["layered"]["expert_loads"]


def test_a_copy_without_end_token(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARKS_DIR", str(tmp_path / "kept"))
    original = tiny_checkpoint("qwen3_moe")
    copy = without_end(original)
    assert copy.parent == bench_dir() == tmp_path / "kept"
    assert "eos_token_id" not in json.loads((copy / "config.json").read_text())
    assert (
        MoE.from_pretrained(copy).logits([1, 2]).equal(MoE.from_pretrained(original).logits([1, 2]))
    )
