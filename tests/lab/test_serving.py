"""The laboratory's model, whatever its router: through the engine as transformers runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.manifest import read_manifest
from lab.routers import LabConfig, LabForCausalLM
from lab.routers.attention import Neighbours
from lab.routers.router import LabRouter
from lab.routers.routers import neighbour_scores
from moe import MoE, SamplingParams
from moe.commands.calibrate.record import record_trace
from moe.commands.convert.convert import convert
from moe.describe.routers import find_selectors
from moe.errors import CheckpointError
from moe.loading.memory_plan import GIB
from moe.network.own_cache import CACHE_ARGUMENT
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, slot_bytes
from routing import Routing

pytestmark = pytest.mark.deep


TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "intermediate_size": 32, "tie_word_embeddings": True,
    "eos_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "plain": {"norm_topk_prob": False},
    "groups": {"router": "sigmoid", "n_group": 4, "topk_group": 2, "group_score": "top2",
               "selection_bias": True},
    "relu": {"router": "relu"},
    "sizes": {"router": "sizes"},
    "pre-attention": {"router": "sigmoid", "router_reads": "block"},
    "pre-gated": {"router_reads": "model"},
    "similarity": {"neighbours": "similarity"},
    "attention": {"neighbours": "attention"},
    "similarity before attention": {"neighbours": "similarity", "router_reads": "block"},
}  # fmt: skip
RAGGED = ("relu", "sizes")
PROMPTS = [list(range(3, 36)), [5, 9, 2, 77, 4], list(range(30, 80, 2))]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def lab_model(router: str) -> LabForCausalLM:
    torch.manual_seed(0)
    model = LabForCausalLM(LabConfig(**TINY, **ROUTERS[router])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif parameter.shape == (4,):
                parameter.normal_()
        for module in model.modules():
            if isinstance(module, LabRouter) and module.config.selection_bias:
                module.bias.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(router: str) -> Path:
        path = tmp_path_factory.mktemp("lab")
        lab_model(router).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_runs_as_in_transformers(
    checkpoint: Callable[[str], Path], router: str
) -> None:
    reference, model = lab_model(router), MoE.from_pretrained(checkpoint(router))
    assert model.status()["packing"]["enabled"]
    ours = model.batch_logits(PROMPTS)
    completions = model.generate(PROMPTS, GREEDY)
    for prompt, logits, completion in zip(PROMPTS, ours, completions, strict=True):
        tokens = [*prompt, *completion.token_ids]
        with torch.no_grad():
            theirs = reference(torch.tensor([tokens])).logits[0]
            cached = reference(torch.tensor([prompt]), use_cache=True)
            cache = {CACHE_ARGUMENT: getattr(cached, CACHE_ARGUMENT)}
            rest = torch.tensor([tokens[len(prompt) :]])
            more = reference(rest, use_cache=True, **cache).logits[0]
        # Scores of "relu" are no shares, which makes rounding several times as large.
        assert torch.allclose(logits, theirs[: len(prompt)], atol=2e-5)
        assert torch.allclose(more, theirs[len(prompt) :], atol=2e-5)
        assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids


@pytest.mark.parametrize("router", RAGGED)
def test_tokens_may_visit_any_number_of_experts(
    checkpoint: Callable[[str], Path], router: str
) -> None:
    model = MoE.from_pretrained(checkpoint(router))
    model.logits(PROMPTS[0])
    (layer, *_) = model.stats()["layers"]
    visits = sum(layer["tokens_per_expert"])
    assert visits % layer["tokens"] or visits // layer["tokens"] not in (0, TINY["num_experts"])
    assert model.status()["fused"]["enabled"], "a router of another kind is called itself"


@pytest.mark.parametrize("router", RAGGED)
def test_traces_hold_passes_of_any_number_of_slots(
    checkpoint: Callable[[str], Path], router: str
) -> None:
    model = MoE.from_pretrained(checkpoint(router))
    windows = [[token] for token in range(3, 9)] * 400  # more than one pass
    trace = record_trace(model.backbone, model.experts, windows, row_bytes=0)
    for layer, ids in enumerate(trace.expert_ids):
        assert ids.shape == trace.weights[layer].shape
        assert torch.equal(ids[:6], ids[-6:])
        used = torch.bincount(ids[ids >= 0].long(), minlength=8)
        assert used.sum() == 400 * (ids[:6] >= 0).sum()


def test_routing_before_attention_is_by_what_enters_the_block(
    checkpoint: Callable[[str], Path],
) -> None:
    model, reference = MoE.from_pretrained(checkpoint("pre-attention")), lab_model("pre-attention")
    trace = record_trace(model.backbone, model.experts, [PROMPTS[0]], row_bytes=0)
    normed: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *call: normed.append(call[-1][0]))
    with torch.no_grad():
        reference(torch.tensor([PROMPTS[0]]))
    for index, layer in enumerate(reference.model.layers):
        scores = (normed[index] @ layer.mlp.gate.weight.T).sigmoid()
        for row, ids, weights in zip(
            scores.tolist(), trace.expert_ids[index].tolist(), trace.weights[index], strict=True
        ):
            best = sorted(sorted(range(8), key=lambda e: -row[e])[:2])
            if min(abs(row[a] - row[b]) for a in best for b in range(8) if b not in best) < 1e-3:
                continue  # too close to say
            assert ids == best
            total = sum(row[e] for e in best)
            assert weights.tolist() == pytest.approx([row[e] / total for e in best], abs=2e-3)


def test_one_router_for_all_layers_is_asked_once(checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(checkpoint("pre-gated"))
    trace = record_trace(model.backbone, model.experts, PROMPTS, row_bytes=0)
    first, *others = trace.expert_ids
    assert all(torch.equal(first, ids) for ids in others)
    assert len(torch.unique(first)) > 4


@pytest.mark.parametrize("router", RAGGED)
def test_ragged_routing_runs_from_a_disk(
    checkpoint: Callable[[str], Path], router: str, tmp_path: Path
) -> None:
    store = convert(
        checkpoint(router), tmp_path / "store", ModelSettings(expert_bits=8, group_size=32)
    )
    profile: dict[str, Any] = {
        "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
        "prefill": {"wave_tokens": 128, "mode": "whole"},
        "engine": {"max_batch_size": 8},
    }
    resident, manifest = MoE.from_pretrained(store, profile), read_manifest(store)
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    room = 6 * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
    profile["memory"]["device_gib"] = (rest + room) / GIB
    profile["offload"] = {"hot_set": False}
    small = MoE.from_pretrained(store, profile)
    assert small.status()["offload"]["slots"] < small.status()["offload"]["experts"]
    assert torch.equal(small.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))
    ours, theirs = small.generate(PROMPTS, GREEDY), resident.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]


@given(st.integers(0, 1 << 30))
def test_attention_mixes_scores_as_its_definition_says(seed: int) -> None:
    torch.manual_seed(seed)
    for kind in ("similarity", "attention"):
        config = LabConfig(**TINY, neighbours=kind)
        config._attn_implementation = "sdpa"
        neighbours = Neighbours(config, 1)
        rows, scores = torch.randn(1, 6, 32), torch.rand(6, 8)
        given_query, given_key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
        with torch.no_grad():
            mixed = neighbours(scores, rows, (given_query, given_key), None, None)
            query, key, shares = given_query[0], given_key[0].repeat_interleave(2, 0), torch.ones(4)
            if kind == "similarity":
                query, key = neighbours.query(rows), neighbours.key(rows)
                shares = torch.ones(1)
            expected = neighbour_scores(scores, query, key, shares / len(shares))
        assert torch.allclose(mixed, expected, atol=1e-5)


def test_a_balanced_plan_is_for_training_alone() -> None:
    torch.manual_seed(0)
    router = LabRouter(LabConfig(**TINY, sinkhorn_share=1.0))
    router.weight.data.normal_()
    rows = torch.randn(64, 32) + 1.0

    def heaviest() -> int:
        _, weights, ids = router(rows)
        return int(Routing.from_router(ids, weights, 8).tokens_per_expert(8).max())

    trained = heaviest()
    router.eval()
    assert heaviest() > trained


def test_where_a_router_can_be_asked_again(checkpoint: Callable[[str], Path]) -> None:
    for router in ("softmax", "plain", "groups"):
        found = find_selectors(MoE.from_pretrained(checkpoint(router)).backbone)
        assert all(one.selector is not None for one in found), found
    for router in ("relu", "pre-attention", "pre-gated", "similarity"):
        found = find_selectors(MoE.from_pretrained(checkpoint(router)).backbone)
        assert all(one.selector is None and one.reason for one in found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"router": "dice"}, "router is 'dice'; it must be one of softmax, sigmoid, relu, sizes"),
        ({"neighbours": "similarity", "router": "relu"}, "it needs router softmax or sigmoid"),
    ],
)
def test_what_cannot_be_configured(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabConfig(**TINY, **wrong)
    good = LabConfig(**TINY)
    for name, value in wrong.items():
        object.__setattr__(good, name, value)
    good.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        MoE.from_pretrained(tmp_path)
