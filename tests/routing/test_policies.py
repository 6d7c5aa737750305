"""Policy chains, the pruning policy against a brute force, and what a profile may ask for."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import PolicyChain, Routing, RoutingContext, RoutingError, parse_policies

CONTEXT = RoutingContext(layer=0, num_experts=8)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    rows = draw(st.lists(st.permutations(range(8)), min_size=0, max_size=5))
    weight = st.floats(0.125, 1.0, width=32)
    weights = [[draw(weight) for _ in range(4)] for _ in rows]
    used = [[draw(st.booleans()) for _ in range(4)] for _ in rows]
    ids = [
        [e if u else -1 for e, u in zip(row[:4], flags, strict=True)]
        for row, flags in zip(rows, used, strict=True)
    ]
    weights = [
        [w if u else 0.0 for w, u in zip(row, flags, strict=True)]
        for row, flags in zip(weights, used, strict=True)
    ]
    return Routing(
        torch.tensor(ids, dtype=torch.int64).reshape(-1, 4), torch.tensor(weights).reshape(-1, 4)
    ).ascending()


@given(routings())
def test_the_empty_chain_is_the_identity(routing: Routing) -> None:
    assert PolicyChain()(routing, CONTEXT) is routing
    assert PolicyChain().lossless


@given(routings(), st.integers(1, 5))
def test_top_k_keeps_the_heaviest_experts(routing: Routing, top_k: int) -> None:
    chain = parse_policies([f"top_k:{top_k}:keep"], lossless=False)
    pruned = chain(routing, CONTEXT).validate(8)
    for before_ids, before_weights, after_ids, after_weights in zip(
        routing.expert_ids.tolist(),
        routing.weights.tolist(),
        pruned.expert_ids.tolist(),
        pruned.weights.tolist(),
        strict=True,
    ):
        slots = [(w, e) for e, w in zip(before_ids, before_weights, strict=True) if e >= 0]
        heaviest = sorted((w for w, _ in slots), reverse=True)[:top_k]
        kept = [(w, e) for e, w in zip(after_ids, after_weights, strict=True) if e >= 0]
        assert sorted((w for w, _ in kept), reverse=True) == heaviest
        assert set(kept) <= set(slots)


@given(routings(), st.integers(1, 3))
def test_renormalising_keeps_the_total_weight(routing: Routing, top_k: int) -> None:
    pruned = parse_policies([f"top_k:{top_k}"], lossless=False)(routing, CONTEXT)
    torch.testing.assert_close(pruned.weights.sum(1), routing.weights.sum(1))


def test_policies_run_in_the_order_given() -> None:
    chain = parse_policies(["top_k:2:keep", "top_k:1"], lossless=False)
    assert [policy.spec for policy in chain.policies] == ["top_k:2:keep", "top_k:1"]
    assert not chain.lossless
    routing = Routing(torch.tensor([[3, 1, 2]]), torch.tensor([[0.5, 0.3, 0.2]]))
    result = chain(routing, CONTEXT)
    assert result.expert_ids.tolist() == [[3]]
    torch.testing.assert_close(result.weights, torch.tensor([[0.8]]))


@pytest.mark.parametrize(
    ("spec", "lossless", "message"),
    [
        ("topk:2", False, "top_k, top_p); did you mean 'top_k'?"),
        ("top_k", False, "write top_k:N or top_k:N:keep"),
        ("top_k:0", False, "with a whole number N >= 1"),
        ("top_k:-1", False, "with a whole number N >= 1"),
        ("top_k:2:drop", False, "policy 'top_k:2:drop' is not valid"),
        ("top_k:2", True, "policy 'top_k:2' changes the model's output"),
        ("top_p:0", False, "policy 'top_p:0' is not valid; write top_p:P with a share P in (0, 1]"),
        ("top_p:nan", False, "policy 'top_p:nan' is not valid"),
        ("top_p:0.5:1", False, "policy 'top_p:0.5:1' is not valid"),
    ],
)
def test_what_a_profile_may_not_ask_for(spec: str, lossless: bool, message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        parse_policies([spec], lossless=lossless)
