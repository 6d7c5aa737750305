"""The routing and the memory limits that `benchmarks.offload` measures with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from benchmarks.memory_group import memory_group, run_limited
from benchmarks.offload_bench import late_belady
from benchmarks.offload_foreseen import Foreseen
from benchmarks.offload_routing import (
    PUBLISHED_COVERAGE,
    PUBLISHED_SAME,
    Record,
    Replay,
    locality,
    published_trace,
)
from examples.models.random_store import SHAPE, write_random_store
from moe import MoE
from routing import Routing, RoutingContext

MIB = 1 << 20


def test_the_replayed_routing_has_the_published_figures() -> None:
    trace = published_trace(1024, layers=12, experts=128, top_k=8)
    figures = locality(trace, 128)
    assert figures["same_as_last_token"] == pytest.approx(PUBLISHED_SAME, abs=0.02)
    for tokens, share in PUBLISHED_COVERAGE.items():
        assert figures[f"coverage_{tokens}"] == pytest.approx(share, abs=0.06)


def test_every_token_of_the_trace_visits_distinct_experts_in_ascending_order() -> None:
    trace = published_trace(64, layers=3, experts=16, top_k=4)
    assert trace.shape == (64, 3, 4)
    assert (np.diff(trace, axis=2) > 0).all()
    assert trace.min() >= 0
    assert trace.max() < 16


def test_replay_sends_tokens_where_the_trace_says_and_begins_again() -> None:
    trace = published_trace(5, layers=2, experts=8, top_k=2)
    replay, context = Replay(trace), RoutingContext(1, 8)
    asked = Routing(torch.zeros(3, 2, dtype=torch.int64), torch.full((3, 2), 0.5))
    rows = [replay(asked, context).validate(8).expert_ids for _ in range(2)]
    expected = torch.from_numpy(trace[[0, 1, 2, 3, 4, 0], 1])
    assert torch.equal(torch.cat(rows), expected)


def test_a_record_of_a_replay_is_the_trace() -> None:
    trace = published_trace(4, layers=2, experts=8, top_k=2)
    replay, record = Replay(trace), Record()
    asked = Routing(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    for layer in range(2):
        context = RoutingContext(layer, 8)
        assert record(replay(asked, context), context).weights is asked.weights
    assert np.array_equal(record.trace, trace)


def test_a_random_store_of_any_size_loads_whole_and_speaks_finite_numbers(tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 2,
        "num_experts": 8,
        "vocab_size": 300,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    config = Qwen3MoeConfig(**(SHAPE | sizes), dtype=torch.bfloat16)
    store = write_random_store(config, tmp_path / "store")
    assert [folder.name for folder in tmp_path.iterdir()] == ["store"]
    model = MoE.from_pretrained(store, model={"verify": True})
    assert torch.isfinite(model.logits(range(100))).all()
    experts = [model.experts.layers[0].planes[e][0] for e in range(8)]  # type: ignore[union-attr]
    assert not torch.equal(experts[0], experts[1])


def test_a_limit_holds_and_is_measured_from_outside() -> None:
    with memory_group(256 * MIB) as group:
        if group.folder is None:
            pytest.skip(f"no control group can be made here: {group.reason}")
    hungry = "import sys, json; b = bytearray({} << 20); print(json.dumps(len(b)))"
    done, usage = run_limited([sys.executable, "-c", hungry.format(100)], 256 * MIB)
    assert json.loads(done.stdout) == 100 * MIB
    assert 100 * MIB <= usage.peak_bytes <= 256 * MIB
    assert not usage.killed
    done, usage = run_limited([sys.executable, "-c", hungry.format(400)], 256 * MIB)
    assert done.returncode != 0
    assert usage.killed
    assert usage.peak_bytes <= 256 * MIB


def test_what_is_foreseen_is_as_often_right_as_stated() -> None:
    trace = published_trace(200, layers=6, experts=32, top_k=4)
    replay = Replay(trace)
    foreseen = Foreseen(replay, 32, recall=0.8)
    right: dict[int, list[float]] = {1: [], 2: []}
    for token in range(200):
        for layer in range(-1, 5):
            forecast = foreseen.forecast(layer, depth=2).validate([32] * 6)
            for distance in (1, 2):
                guesses = forecast.expert[forecast.deadline == distance].tolist()
                if guesses:
                    assert len(set(guesses)) == 4
                    true = set(trace[token, layer + distance].tolist())
                    right[distance].append(len(true & set(guesses)) / 4)
            asked = Routing(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4))
            replay(asked, RoutingContext(layer + 1, 32))
    assert np.mean(right[1]) == pytest.approx(0.8, abs=0.03)
    assert np.mean(right[2]) == pytest.approx(0.64, abs=0.03)


def test_belady_over_the_last_tokens_is_at_least_what_a_simple_cache_hits() -> None:
    trace = published_trace(120, layers=4, experts=32, top_k=4)
    early = late_belady(trace, 32, 32, timed=60)
    assert 0.3 < early < late_belady(trace, 32, 64, timed=60) <= 1
    assert late_belady(trace, 32, 128, timed=60) > 0.9
