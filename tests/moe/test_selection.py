"""A model's router found by probing decides as the model does, and among fewer experts if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe import MoE
from moe.describe.routers import find_selectors
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.moe_layer import FoundSelector, Selector
from moe.network.packed_pass import Work
from tests.amounts import deep_except

FOUND = [
    "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "gpt_oss",
    "granitemoehybrid", "phimoe", "hunyuan_v1_moe", "nemotron_h", "lfm2_moe", "qwen3_next", "jamba",
    "afmoe", "minimax_m2", "inkling2_loop_text",
]  # fmt: skip
UNKNOWN = ["zaya", "gemma4_text"]


def visits_of(model: MoE) -> list[ExpertCall]:
    """What a prompt brings to each MoE layer: copies, as compiled layers use its memory again."""
    seen: list[ExpertCall] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        seen.extend(map(deepcopy, calls))
        return model.experts.run(layer, calls)

    with torch.inference_mode():
        work = Work(list(range(3, 40)), model.backbone.new_cache(37))
        lanes = model.backbone.lanes([work])
        run_lanes(lanes, run)
        lanes[0].result()
    return seen


def selector_of(found: FoundSelector) -> Selector:
    assert found.selector is not None, found.reason
    return found.selector


@pytest.mark.parametrize("model_type", deep_except(["deepseek_v3", "gpt_oss"], FOUND))
def test_with_nothing_restricted_it_is_the_models_own_routing(
    tiny_moe: Callable[[str], MoE], model_type: str
) -> None:
    model = tiny_moe(model_type)
    calls = visits_of(model)
    found = find_selectors(model.backbone)
    assert len(found) == len({call.layer for call in calls}) == len(model.experts.layers)
    for call in calls:  # of looped layers, several
        selector = selector_of(found[call.layer])
        scores = selector.scores(call.hidden_states)
        routing = selector.select(scores)
        assert torch.equal(routing.expert_ids, call.routing.expert_ids)
        assert torch.allclose(routing.weights, call.routing.weights, rtol=1e-5, atol=1e-6)
        everybody = torch.ones_like(scores, dtype=torch.bool)
        again = selector.select(scores, everybody, routing.top_k)
        assert torch.equal(again.weights, routing.weights)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_rule_of_a_router_in_half_precision_is_that_of_float32(
    tiny_moe: Callable[[str], MoE], tiny_checkpoint: Callable[[str], Path], model_type: str
) -> None:
    """What a GPU has: the router rounds, and its rule is found on a float32 copy of it."""
    half = MoE.from_pretrained(tiny_checkpoint(model_type), model={"dtype": "bfloat16"})
    pairs = zip(
        find_selectors(half.backbone), find_selectors(tiny_moe(model_type).backbone), strict=True
    )
    for found, expected in [(selector_of(one), selector_of(other)) for one, other in pairs]:
        assert found.weight.dtype == torch.bfloat16
        assert replace(found.rule, correction=None) == replace(expected.rule, correction=None)
        assert (found.rule.correction is None) == (expected.rule.correction is None)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "phimoe"])
def test_only_what_is_allowed_is_chosen(tiny_moe: Callable[[str], MoE], model_type: str) -> None:
    model = tiny_moe(model_type)
    selector = selector_of(find_selectors(model.backbone)[0])
    scores = selector.scores(visits_of(model)[0].hidden_states)
    allowed = torch.zeros(8, dtype=torch.bool)
    allowed[[1, 6, 7]] = True
    routing = selector.select(scores, allowed).validate(8)
    assert set(routing.expert_ids.unique().tolist()) <= {-1, 1, 6, 7}
    one = selector.select(scores, allowed, top_k=1)
    assert one.top_k == 1
    assert bool((one.expert_ids == routing.expert_ids).any(1).all())


@pytest.mark.deep
@pytest.mark.parametrize("model_type", UNKNOWN)
def test_a_layer_whose_rule_is_not_known_says_why(
    tiny_moe: Callable[[str], MoE], model_type: str
) -> None:
    found = find_selectors(tiny_moe(model_type).backbone)
    assert all(one.selector is None for one in found)
    assert {one.reason for one in found} <= {
        "its router follows no rule that is known here",
        "the router follows no rule that is known here",
        "its router reads other rows than its experts",
    }


def test_looking_reads_no_experts(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    model.reset_stats()
    find_selectors(model.backbone)
    assert all(layer["steps"] == 0 for layer in model.stats()["layers"])
    assert not any(module._forward_hooks for module in model.backbone.model.modules())
