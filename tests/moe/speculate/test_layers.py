"""What a draft makes of routings: who may be visited, and with what weight."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ExpertWeights, experts_forward
from moe.network.lanes import ExpertCall
from moe.network.moe_layer import Selector
from moe.settings.profile import load_profile
from moe.speculate.draft import DRAFT_RULES, DraftRule, Mode
from moe.speculate.elastic import DraftLayers, restrict
from offload.layer import OffloadedExperts
from routing import Routing
from routing.routers import RouterRule
from tests.offload.test_experts import make
from tests.readbacks import readbacks

EXPERTS, HIDDEN = 6, 8
RULES: list[DraftRule | None] = [None]
RULES += [make(load_profile({}, environ={}).profile) for make in DRAFT_RULES.of_all()]
"""None, and those of all methods with their defaults."""


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    tokens, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = [draw(st.permutations(range(EXPERTS)))[:top_k] for _ in range(tokens)]
    weights = [[draw(st.integers(1, 9)) / 10 for _ in row] for row in rows]
    return Routing.from_router(torch.tensor(rows), torch.tensor(weights), EXPERTS)


@given(routings(), st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS), st.integers(1, 5))
def test_restricted_routings(routing: Routing, allowed: list[bool], top_k: int) -> None:
    made = restrict(routing, torch.tensor(allowed), top_k).validate(EXPERTS)
    for ids, weights, before, old in zip(
        made.expert_ids.tolist(),
        made.weights.tolist(),
        routing.expert_ids.tolist(),
        routing.weights.tolist(),
        strict=True,
    ):
        kept = {expert: weight for expert, weight in zip(ids, weights, strict=True) if expert >= 0}
        possible = {e: w for e, w in zip(before, old, strict=True) if allowed[e]}
        assert len(kept) == min(top_k, len(possible))
        assert kept.keys() <= possible.keys()
        left_out = [w for e, w in possible.items() if e not in kept]
        assert max(left_out, default=0.0) <= min((possible[e] for e in kept), default=9.0)
        if kept:
            assert abs(sum(kept.values()) - sum(old)) < 1e-5


@given(routings())
def test_nothing_to_leave_out_changes_nothing(routing: Routing) -> None:
    assert restrict(routing, None, None) is routing
    assert restrict(routing, torch.ones(EXPERTS, dtype=torch.bool), routing.top_k) is routing


def layer() -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
    return ExpertWeights(gate_up, down, lambda x: x[:, :HIDDEN].sigmoid() * x[:, HIDDEN:])


@given(routings())
def test_bytes_are_those_of_distinct_experts(routing: Routing) -> None:
    experts = layer()
    layers = DraftLayers([experts], experts_forward, [None])
    layers.begin(Mode("elastic"))
    rows = torch.ones(routing.num_tokens, HIDDEN)
    (made,) = layers.run(0, [ExpertCall(0, rows, routing)])
    assert isinstance(made, torch.Tensor)
    expected = experts_forward(rows, routing.expert_ids, routing.weights, experts)
    assert torch.equal(made, expected)
    distinct = len(set(routing.expert_ids.flatten().tolist()))
    assert layers.bytes_read == distinct * experts.expert_bytes
    assert torch.equal(layers.wanted[0][0], routing.expert_ids)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name if rule else "all")
@pytest.mark.parametrize("top_k", [None, 1])
def test_a_layer_of_a_cache_is_reduced_without_waiting_for_a_device(
    rule: DraftRule | None, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same rows as where the host looks whether anything is missing."""
    disk = make(True, False, Random(0))
    cached = disk.cache(len(disk.resident) * disk.resident[0].num_experts, "lru")
    count = disk.resident[0].num_experts
    experts = OffloadedExperts(0, count, cached, disk.arena.experts)
    chooses = RouterRule(3, renormalise=True)
    router = Selector(torch.randn(count, experts.hidden_size), None, chooses)
    rows = torch.randn(4, experts.hidden_size)
    routing = router.select(router.scores(rows))
    mode = Mode("elastic", experts=top_k, rules=() if rule is None else (rule,))
    layers = DraftLayers([experts], experts_forward, [router])

    def reduced() -> torch.Tensor:
        layers.begin(mode)
        layers.look(rows.device)
        return layers.reduced(0, rows, routing)

    for here in ([0, 2, 3], range(count)):
        cached.warm((0, expert) for expert in here)
        cached._manager.settle_unpinned()
        expected = reduced()
        with monkeypatch.context() as patch:
            patch.setattr("moe.speculate.elastic._all", lambda _: False)
            torch.testing.assert_close(reduced(), expected)
            assert not readbacks(lambda: layers.reduced(0, rows, routing))
        padded = Routing(routing.expert_ids.clone(), routing.weights.clone())
        padded.expert_ids[2:], padded.weights[2:] = -1, 0.0
        layers.begin(mode)
        before = layers.bytes_read
        assert not layers.reduced(0, rows, padded)[2:].any()
        assert layers.bytes_read > before
