"""ODP against a slow oracle written from the paper."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.methods.odp.policy import OnlineDynamicPruning
from routing import Routing, RoutingContext, RoutingError
from tests.routing.policy_cases import E, context, made, parse, same, scaled, seeds, sizes, table_of


@given(seeds, sizes, st.floats(0, 1))
def test_odp_drops_what_weighs_little(seed: int, tokens: int, ratio: float) -> None:
    scores, rule, routing = made(seed, tokens)
    expected = []
    for row in table_of(routing):
        least = torch.tensor(ratio) * max(row.values())
        expected.append(scaled({e: w for e, w in row.items() if w >= least}, row))
    chain = parse(f"odp:{ratio:.9g}")
    same(chain(routing, context(scores, rule)), expected)


def test_odp_with_a_ratio_for_each_layer() -> None:
    policy = OnlineDynamicPruning.parse(["0.3,0.6"])
    assert policy.spec == "odp:0.3,0.6"
    policy.check(2)
    with pytest.raises(RoutingError, match="has numbers for 2 MoE layers, and the model has 3"):
        policy.check(3)
    routing = Routing(torch.tensor([[1, 2]]), torch.tensor([[0.4, 0.8]]))
    for layer, kept in ((0, [1, 2]), (1, [2, -1])):
        found = policy(routing, RoutingContext(layer, E, "decode"))
        assert found.expert_ids.tolist() == [kept]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("odp:1.5", "write odp:RATIO with shares in [0, 1]"),
        ("odp:0.4,:0.1", "policy 'odp:0.4,:0.1' is not valid"),
    ],
)
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        parse(spec)
