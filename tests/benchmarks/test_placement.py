"""The placement benchmark: its traces, and the bounds that issue 6 sets on a drawn one."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement import ROOT, judge, text_trace, zipf_trace
from moe import MoE


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_with_a_quarter_of_copies_ranks_are_level(exponent: float) -> None:
    figures = judge(zipf_trace(exponent, step=256, steps=12)[:1], ranks=8, slots=80)
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
    figures = judge(np.repeat(trace[:1], 2, axis=1), ranks=4, slots=40)
    assert 1.0 <= figures["ours"] <= figures["eplb"]
