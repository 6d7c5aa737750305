"""Core sets of drafts: whom they hold, and how they are named."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import experts_forward
from moe.methods.core_drafts.rule import CoreSet, elected, heaviest
from moe.settings.profile import load_profile
from moe.speculate.draft import Mode
from moe.speculate.elastic import DraftLayers
from routing import Routing
from tests.moe.speculate.test_layers import EXPERTS, layer, routings


@given(routings(), st.integers(1, 3))
def test_the_heaviest_of_each_row(routing: Routing, count: int) -> None:
    expected = {
        expert
        for ids, weights in zip(routing.expert_ids.tolist(), routing.weights.tolist(), strict=True)
        for _, expert in sorted(zip([-w for w in weights], ids, strict=True))[:count]
    }
    assert set(heaviest(routing, count, EXPERTS).nonzero().flatten().tolist()) == expected


def test_votes_elect_among_those_who_are_here() -> None:
    votes = torch.tensor([0.5, 3.0, 0.0, 1.0])
    assert elected(votes, None, 0.5).tolist() == [False, True, False, True]
    here = torch.tensor([True, False, True, True])
    assert elected(votes, here, 0.5).tolist() == [True, False, False, True]
    assert elected(votes, None, 0.01).sum() == 1


def test_a_profile_makes_the_rule() -> None:
    given = {"methods.core_drafts": {"select": "vote", "share": 0.25}}
    rule = CoreSet.of(load_profile(given, environ={}).profile)
    assert Mode("elastic", bits=2, rules=(rule,)).name == "elastic:2b:vote0.25"
    rule = CoreSet.of(load_profile({"methods.core_drafts.select": "seq"}, environ={}).profile)
    assert Mode("elastic", rules=(rule,)).name == "elastic:seq"


def test_votes_of_a_draft_add_up_and_another_draft_begins_anew() -> None:
    layers = DraftLayers([layer()], experts_forward, [None])
    mode = Mode("elastic", rules=(CoreSet(1 / EXPERTS),))

    def used(expert: int, weight: float) -> bool:
        """Run a pass with one row of one expert; returns whether the draft used it."""
        before = layers.bytes_read
        routing = Routing(torch.tensor([[expert]]), torch.tensor([[weight]]))
        layers.reduced(0, torch.ones(1, layer().hidden_size), routing)
        return layers.bytes_read > before

    layers.begin(mode)
    assert [used(2, 3.0), used(4, 1.0), used(2, 1.0)] == [True, False, True]
    layers.begin(mode)
    assert used(4, 1.0)
