"""The placement benchmark: its traces, and the bounds that issue 6 sets on a drawn one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.placement import ROOT, judge, rebalanced, text_trace, zipf_trace
from benchmarks.placement_online import Reader
from moe import MoE
from routing.predict import contexts
from routing.predict.token_table import fit_token_table


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_with_a_quarter_of_copies_ranks_are_level(exponent: float) -> None:
    figures = judge(zipf_trace(exponent, step=256, steps=12)[:1], ranks=8, replicas=0.25)
    assert figures["ours"] <= 1.10
    assert figures["ours"] < figures["eplb"] < figures["linear"]
    assert figures["over_whole"] == pytest.approx(0.0)
    assert figures["over_cut"] <= 0.02


def test_the_trace_of_a_text_counts_every_slot_of_every_token() -> None:
    model = MoE.from_pretrained(ROOT / "examples/demo-model")
    text = (ROOT / "tests/data/heldout_python.txt").read_text()[:2000]
    trace = text_trace(model, text, step=64, steps=3)
    assert trace.shape == (len(model.stats()["layers"]), 3, 32)
    assert (trace.sum(2) == 64 * 4).all()
    mixed = text_trace(model, text, step=3, steps=64, mixed=True)
    assert mixed.shape == (len(trace), 64, 32)
    assert (mixed.sum(2) == 3 * 4).all()
    figures = judge(np.repeat(trace[:1], 2, axis=1), ranks=4, replicas=0.25)
    assert 1.0 <= figures["ours"] <= figures["eplb"]


def test_favourites_that_change_are_followed() -> None:
    before_E, after_E = np.array([[90, 60, 40, 30, 16, 10, 6, 4], [90, 4, 10, 6, 60, 30, 40, 16]])
    trace = np.array([[before_E] * 96 + [after_E] * 96] * 2)
    once, found = judge(trace, ranks=4, replicas=0.0), rebalanced(trace, 4, 0.0, None)
    assert once["hindsight"] <= found["rebalanced"] < once["ours"] - 0.05
    assert 0.0 < found["moved"] < 1.0


def test_a_prompt_that_is_read_says_what_is_still_to_come() -> None:
    model = MoE.from_pretrained(ROOT / "examples/demo-model")
    text = (ROOT / "tests/data/heldout_python.txt").read_text()[:2000]
    ids = model.codec.encode(text)[: 64 * 4]
    tokens = contexts(torch.tensor(ids), 2)
    visited = torch.arange(32).expand(len(ids), 32)[:, :4]
    layers = len(model.experts.layers)
    table = fit_token_table(tokens, [visited] * layers, [32] * layers, 1 << 16)
    reader = Reader(model, table, ids, 64)
    for left in (3, 2, 1, 0):
        reader.begin()
        found = reader.arrivals.of_layer(0, ahead=9)
        if 0 < left < 3:
            assert found is not None
            assert found.coming_SE.shape == (left, 32)
            assert found.coming_SE.sum(1) == pytest.approx([64 * 4] * left, rel=0.05)
        reader.end()
