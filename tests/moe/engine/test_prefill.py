"""Predicted expert loads against a known table, and the choice of `auto`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moe import MoE, SamplingParams
from moe.engine.prefill_mode import (
    LayerWork,
    PrefillPlanner,
    choose_prefill,
    chunked_loads,
    layered_loads,
    measured_frequencies,
)
from moe.settings import PrefillSettings
from routing import Routing, RoutingStatistics

UNIFORM = [np.full(128, 8 / 128)]  # one layer of 128 experts, top-8
EVEN = LayerWork(backbone=8, pair=0, expert=1, top_k=8)


@pytest.mark.parametrize(
    ("tokens", "decoding", "chunked", "layered"),
    [
        (8192, 1, 2048, 248),
        (8192, 16, 2048, 1364),
        (8192, 32, 2048, 1805),
        (8192, 64, 2048, 2017),
        (2048, 16, 512, 375),
    ],
)
def test_predicted_loads_are_those_of_the_paper_s_law(
    tokens: int, decoding: int, chunked: int, layered: int
) -> None:
    stages = tokens // 512
    assert round(chunked_loads(UNIFORM, [512] * stages, decoding)) == chunked
    assert round(layered_loads(UNIFORM, tokens, stages, decoding)) == layered


def test_auto_takes_layers_while_decoding_leaves_experts_unread() -> None:
    settings, model = PrefillSettings(mode="auto"), UNIFORM * 48
    few = choose_prefill(settings, model, EVEN, num_tokens=8192, num_decoding=4)
    assert few.mode == "layered"
    assert few.layered_loads < 0.5 * few.chunked_loads
    wide = PrefillSettings(mode="auto", chunk_tokens=2048)
    many = choose_prefill(wide, model, EVEN, num_tokens=8192, num_decoding=64)
    assert many.mode == "chunked"
    assert many.layered_loads > many.chunked_loads


def test_frequencies_are_counts_over_tokens() -> None:
    statistics = RoutingStatistics([4, 2])
    assert [p.tolist() for p in measured_frequencies(statistics)] == [[0.25] * 4, [0.5] * 2]
    statistics.record(0, {"prefill": Routing(torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 2))})
    assert measured_frequencies(statistics)[0].tolist() == [1.0, 0.5, 0.5, 0.0]
    assert measured_frequencies(statistics, top_k=2)[1].tolist() == [1.0, 1.0]


def test_stages_count_experts_as_the_router_did() -> None:
    statistics = RoutingStatistics([16] * 12)
    work = LayerWork(backbone=1, pair=0, expert=1, top_k=1)
    planner = PrefillPlanner(PrefillSettings(group_tokens=64), lambda: work, statistics)
    assert planner.pauses([range(64)]) == ()
    # Four layers would be as long as a chunk, and the first stage has an attention more.
    assert (
        planner.pauses([range(180)]) == planner.pauses([range(100, 190), range(90)]) == (3, 7, 11)
    )
    for layer in range(12):
        routing = Routing(torch.arange(8).repeat(4, 1), torch.ones(4, 8))
        statistics.record(layer, {"prefill": routing})
    assert planner.pauses([range(180)]) == (4, 8)


def test_the_engine_reports_its_choice(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), {"prefill.chunk_tokens": 16})
    engine = model.engine()
    engine.submit(model.request([3, 4, 5], SamplingParams(max_new_tokens=1)))
    engine.step()
    assert engine.status()["prefill"] is None  # one step reads it: there is no choice
    engine.submit(model.request(list(range(3, 60)), SamplingParams(max_new_tokens=1)))
    engine.step()
    prefill = engine.status()["prefill"]
    assert prefill["mode"] in ("chunked", "layered")
    assert 0 < prefill["layered_loads"] <= prefill["chunked_loads"]


def test_an_engine_goes_without_the_garbage_collector(tiny_moe: Callable[[str], MoE]) -> None:
    engine = tiny_moe("qwen3_moe").engine()
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
