"""Routing policies inside a model: what they are told, whom they are for, and where they cannot be
had."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.describe.routers import enable_policies
from moe.errors import ProfileError
from moe.loading.memory_plan import GIB
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.moe_layer import decide
from moe.network.packed_pass import Work
from moe.settings import ModelSettings
from routing import Need, Phase, PolicyChain, Routing, RoutingContext, RoutingPolicy
from routing.policies.pruning import TopK

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:3000]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@dataclass(eq=False)
class Told(RoutingPolicy):
    """Remembers what it is told."""

    needs: ClassVar[frozenset[Need]] = frozenset({"select", "resident"})
    spec: str = "told"
    contexts: list[tuple[Routing, RoutingContext]] = field(default_factory=list)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        self.contexts.append((routing, context))
        return routing


def told(model: MoE, work: list[Work]) -> list[tuple[Routing, RoutingContext]]:
    """What a policy is told of each layer."""
    policy = Told()
    enable_policies(PolicyChain((policy,)), model.backbone, model.experts)
    with torch.inference_mode():
        run_lanes(model.backbone.lanes(work), model.experts.run)
    return policy.contexts


def test_a_policy_is_told_what_it_needs(tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint("qwen3_moe")
    model = MoE.from_pretrained(path)
    prompts = [list(range(3, 40)), [5, 9, 2]]
    work = [Work(ids, model.backbone.new_cache(len(ids))) for ids in prompts]
    contexts = told(model, work)
    assert [context.layer for _, context in contexts] == list(range(len(contexts)))
    for routing, context in contexts:
        assert context.phase == "prefill"
        assert context.resident_E is None
        assert context.select is not None
        same = context.select(torch.ones(context.num_experts, dtype=torch.bool), routing.top_k)
        assert torch.equal(same.expert_ids, routing.expert_ids)
        torch.testing.assert_close(same.weights, routing.weights)


def test_decoded_tokens_share_and_prompts_do_not() -> None:
    lossy = {"policies": ["des_vote:0.25:8"]}
    model = MoE.from_pretrained(DEMO, routing=lossy, lossless=False)
    plain = MoE.from_pretrained(DEMO)
    prompts = [TEXT[start : start + 60] for start in range(0, 480, 60)]
    distinct = []
    for each in (model, plain):
        each.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0.0))
        prompt_loads = [layer["expert_loads"] for layer in each.stats()["layers"]]
        each.reset_stats()
        each.generate(prompts, GREEDY)
        loads = [layer["expert_loads_by"]["decode"] for layer in each.stats()["layers"]]
        distinct.append((prompt_loads, [load / 7 for load in loads]))
    assert distinct[0][0] == distinct[1][0]
    assert max(distinct[0][1]) <= 8
    assert min(distinct[1][1]) > 12


@pytest.mark.deep
def test_where_a_router_is_not_known_choosing_again_is_refused(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    path = tiny_checkpoint("gemma4_text")
    for spec in ("des_seq:1:8", "resident:0.1"):
        message = rf"'{spec}' chooses experts again .* not known for Gemma4\w* \(MoE layer 0: "
        with pytest.raises(ProfileError, match=message):
            MoE.from_pretrained(path, routing={"policies": ["top_p:0.9", spec]}, lossless=False)
    MoE.from_pretrained(path, routing={"policies": ["top_p:0.9", "odp:0.5"]}, lossless=False)


def test_numbers_for_other_layers_are_refused() -> None:
    message = re.escape("routing.policies: policy 'odp:0.1,0.2' has numbers for 2 MoE layers")
    with pytest.raises(ProfileError, match=message):
        MoE.from_pretrained(DEMO, routing={"policies": ["odp:0.1,0.2"]}, lossless=False)


def test_residents_save_reads(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(tiny_checkpoint("qwen3_moe"), tmp_path / "store", settings)
    small: dict[str, Any] = {
        "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
        "prefill": {"wave_tokens": 128, "mode": "whole"},
        "engine": {"max_batch_size": 8},
        "offload": {"hot_set": False, "predictor": "off"},
    }
    whole = MoE.from_pretrained(store, small)
    experts = sum(line.bytes for line in whole.memory_plan.lines if line.name == "experts")
    total = sum(line.bytes for line in whole.memory_plan.lines)
    small["memory"]["device_gib"] = (total - 0.6 * experts) / GIB
    missed = []
    for policies in ([], ["resident:0.9"]):
        profile = small | {"routing": {"policies": policies}, "lossless": not policies}
        model = MoE.from_pretrained(store, profile)
        model.generate([[5, 9, 2]], SamplingParams(max_new_tokens=40, temperature=0.0))
        missed.append(model.stats()["offload"]["misses"])
    assert missed[1] < missed[0]


@dataclass(frozen=True)
class Heaviest(RoutingPolicy):
    """Prompts visit one expert."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    spec: str = "heaviest"

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        assert context.phase == "prefill"
        return TopK(1)(routing, context)


def test_tokens_are_taken_by_phase_and_keep_their_order() -> None:
    sizes: list[tuple[int, Phase]] = [(2, "decode"), (3, "prefill"), (0, "prefill"), (1, "decode")]
    generator = torch.Generator().manual_seed(0)
    calls = []
    for count, phase in sizes:
        ids = torch.rand(count, 6, generator=generator).argsort(1)[:, :2].sort(1).values
        weights = torch.rand(count, 2, generator=generator)
        calls.append(ExpertCall(0, torch.zeros(count, 4), Routing(ids, weights), phase))
    experts = MoE.from_pretrained(DEMO).experts.layers[0]
    plain = decide(PolicyChain(), 0, calls, experts)
    found = decide(PolicyChain((Heaviest(),)), 0, calls, experts).validate(32)
    assert torch.equal(plain.expert_ids, torch.cat([call.routing.expert_ids for call in calls]))
    decoded = torch.tensor([0, 1, 5])
    assert torch.equal(found.expert_ids[decoded], plain.expert_ids[decoded])
    assert (found.expert_ids[2:5] >= 0).sum(1).tolist() == [1, 1, 1]
