"""Recall of predictors: by its definition, and for a router that takes any number of experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.routers import LabConfig, LabForCausalLM
from lab.routers.recall import recall_at_used, recalls
from moe import MoE
from moe.commands.calibrate.record import record_trace
from routing.predict.calibrated import PREDICTORS

pytestmark = pytest.mark.deep


@given(st.integers(0, 1 << 30))
def test_a_token_gets_as_many_guesses_as_it_visits_experts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(4, (9, 6), generator=generator).float()
    wanted = torch.rand(9, 6, generator=generator) < 0.4
    rows = [sorted(range(6), key=row.__getitem__) for row in (-scores).tolist()]
    visited = [[e for e in range(6) if row[e]] for row in wanted.tolist()]
    hits = sum(len({*row[: len(own)]} & {*own}) for row, own in zip(rows, visited, strict=True))
    ids = torch.tensor([own + [-1] * (6 - len(own)) for own in visited])
    assert recall_at_used(scores, ids) == pytest.approx(hits / sum(map(len, visited)))
    assert math.isnan(recall_at_used(scores, torch.full_like(ids, -1)))


@pytest.mark.parametrize("router", ["relu", "sizes"])
def test_every_predictor_but_raw_gates_foretells_ragged_routing(
    router: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LabConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_experts=8, moe_intermediate_size=16,
        router=router, eos_token_id=0, initializer_range=0.05,
    )  # fmt: skip
    LabForCausalLM(config).save_pretrained(tmp_path)
    model = MoE.from_pretrained(tmp_path)
    windows = torch.randint(1, 64, (60, 32), generator=torch.Generator().manual_seed(1)).tolist()
    found = recalls(model, windows[:50], record_trace(model.backbone, model.experts, windows[50:]))
    named = {name for name in PREDICTORS if not name.endswith("_raw")} | {"popular"}
    assert found.keys() == {f"recall_{name}" for name in named}
    better = named - {"popular", "path"}  # a network needs more than 1,600 tokens
    assert all(found[f"recall_{name}"] > found["recall_popular"] for name in better)
