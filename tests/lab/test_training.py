"""The laboratory's training: losses by their definitions, and a few steps of every variant."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from examples import demo_data as data
from lab.routers import LabConfig
from lab.routers.early_residual import fit, recall, watch
from lab.routers.objectives import (
    CHUNK,
    Routed,
    budget_loss,
    chunk_loss,
    locality_loss,
    switch_loss,
)
from lab.routers.router import LabRouter
from lab.routers.train import EARLIER, build_model, load_corpus, train
from lab.routers.variants import BASE, VARIANTS
from moe import MoE
from routing import Routing

pytestmark = pytest.mark.deep


KINDS = ("softmax", "bias", "bias-dual", "sinkhorn-often", "relu-local", "sizes", "pre-gated")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return load_corpus(tmp_path_factory.mktemp("corpus"), quick=True)


def routed(logits: torch.Tensor, ids: list[list[int]]) -> Routed:
    router = LabRouter(LabConfig(num_experts=4, hidden_size=8))
    return Routed(router, logits, Routing(torch.tensor(ids), torch.ones(len(ids), 1)))


def test_the_switch_loss_is_one_where_all_is_level() -> None:
    level = routed(torch.zeros(4, 4), [[0], [1], [2], [3]])
    assert float(switch_loss(level)) == pytest.approx(1.0)
    logits = torch.tensor([[3.0, 0.0, 0.0, 0.0]] * 4)
    uneven = routed(logits, [[0]] * 4)
    assert float(switch_loss(uneven)) == pytest.approx(4 * float(logits[0].softmax(-1)[0]))


def test_locality_is_lost_where_neighbours_activate_differently() -> None:
    alike = torch.tensor([[1.0, -1.0]] * 6)
    changing = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 3)
    assert float(locality_loss(alike, 2)) < 1e-3
    assert float(locality_loss(changing, 2)) > 10
    borders = torch.tensor([[1.0, -1.0]] * 3 + [[-1.0, 1.0]] * 3)
    assert float(locality_loss(borders, 2)) < 1e-3, "another sequence is no neighbour"


def test_the_chunk_loss_is_the_share_of_experts_that_a_chunk_needs() -> None:
    logits = torch.full((2 * CHUNK, 4), -1.0)
    logits[:, 2] = 1.0
    assert float(chunk_loss(logits)) == pytest.approx(0.25, abs=1e-4)
    even = torch.ones(CHUNK, 4)
    assert float(chunk_loss(even)) == pytest.approx(1 - 0.75**CHUNK, abs=1e-4)


def test_the_budget_is_for_all_tokens_together() -> None:
    some = torch.tensor([[math.log(2.0), 0.0, 0.0]])  # half of the probability
    assert float(budget_loss(some, 0.5)) == pytest.approx(0.0, abs=1e-6)
    assert float(budget_loss(some.repeat(3, 1), 0.2)) == pytest.approx(0.09)


@pytest.mark.parametrize("name", KINDS)
def test_every_variant_trains_and_loads(name: str, corpus: data.Corpus, tmp_path: Path) -> None:
    train(name, corpus, tmp_path, steps=3, layers=2)
    early, late = (MoE.from_pretrained(path) for path in (tmp_path / "earlier", tmp_path))
    tokens = list(range(3, 30))
    assert late.codec.tokenizer is not None
    assert not torch.equal(early.logits(tokens), late.logits(tokens)), EARLIER
    if VARIANTS[name].bias:
        gates = [m for m in late.backbone.model.modules() if isinstance(m, LabRouter)]
        assert all(bool(gate.bias.any()) for gate in gates)


def test_all_variants_start_alike(corpus: data.Corpus) -> None:
    end, size = corpus.tokenizer.eos_token_id, len(corpus.tokenizer)
    models = [build_model(VARIANTS[name], size, end, 1) for name in ("softmax", "bias", "relu")]
    embeddings = [model.model.embed_tokens.weight for model in models]
    assert all(torch.equal(embeddings[0], other) for other in embeddings)
    assert BASE["num_hidden_layers"] == len(models[0].model.layers)


def test_deeper_models_are_larger() -> None:
    sizes = [build_model(VARIANTS["bias"], 1024, 0, 1, n).num_parameters() for n in (4, None)]
    assert [round(size / 1e6, 1) for size in sizes] == [1.9, 3.7]


def test_a_fast_stream_starts_as_the_residual_and_learns() -> None:
    model = build_model(VARIANTS["softmax"], 64, 0, 0, layers=4).eval()
    batches = list(torch.randint(1, 64, (40, 2, 32), generator=torch.Generator().manual_seed(0)))
    start, learnt = fit(model, [], 2, 16), fit(model, batches, 2, 16)
    seen = watch(model, batches[0])
    assert [len(part) for part in seen] == [4, 4, 4]
    states = start(seen.residual, seen.attention)
    assert all(torch.equal(a, b) for a, b in zip(states, seen.residual, strict=False))
    before, after = (recall(model, stream, batches[0], 2) for stream in (start, learnt))
    assert before["adapted, layer 1 for 2"] == before["raw, layer 1 for 2"]
    assert after["adapted, layer 1 for 2"] > before["adapted, layer 1 for 2"] + 0.05
