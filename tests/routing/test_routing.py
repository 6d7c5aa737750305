"""The `Routing` value: its invariants, and that cutting and joining lose nothing."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import Routing, RoutingError
from routing.routing import select_top_k


def random_routing(seed: int, tokens: int, top_k: int, experts: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    unused = torch.rand(tokens, top_k, generator=generator) < 0.2
    weights = torch.rand(tokens, top_k, generator=generator).masked_fill(unused, 0.0)
    return Routing(order.masked_fill(unused, -1), weights).ascending()


@given(st.integers(0, 999), st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 4))
def test_split_and_concat_are_inverse(seed: int, sizes: list[int], top_k: int) -> None:
    routing = random_routing(seed, sum(sizes), top_k, experts=6)
    joined = Routing.concat(routing.split(sizes))
    assert torch.equal(joined.expert_ids, routing.expert_ids)
    assert torch.equal(joined.weights, routing.weights)


@given(st.integers(0, 999), st.integers(0, 9), st.integers(1, 4), st.integers(1, 4))
def test_concat_pads_narrow_parts_with_unused_slots(seed: int, tokens: int, a: int, b: int) -> None:
    parts = [random_routing(seed, tokens, a, 6), random_routing(seed + 1, tokens, b, 6)]
    joined = Routing.concat(parts).validate(6)
    assert joined.top_k == max(a, b)
    expected = parts[0].tokens_per_expert(6) + parts[1].tokens_per_expert(6)
    assert torch.equal(joined.tokens_per_expert(6), expected)


@given(st.integers(0, 999), st.integers(0, 9), st.integers(1, 6))
def test_tokens_per_expert_counts_like_a_loop(seed: int, tokens: int, top_k: int) -> None:
    routing = random_routing(seed, tokens, top_k, experts=7)
    counts = [0] * 7
    for row in routing.expert_ids.tolist():
        for expert in row:
            if expert >= 0:
                counts[expert] += 1
    assert routing.tokens_per_expert(7).tolist() == counts


def test_slots_are_in_order_and_ids_outside_the_layer_unused() -> None:
    routing = Routing.from_router(
        torch.tensor([[0, 4], [-1, 3], [3, 1]]),
        torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.7, 0.3]]),
        num_experts=4,
    )
    assert routing.expert_ids.tolist() == [[0, -1], [3, -1], [1, 3]]
    assert torch.equal(routing.weights, torch.tensor([[0.5, 0.0], [0.25, 0.0], [0.3, 0.7]]))
    assert routing.expert_ids.dtype == torch.int64
    assert routing.validate(4) is routing


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(1, 6))
def test_equal_scores_go_to_the_lower_id(scores: list[int], top_k: int) -> None:
    chosen = select_top_k(torch.tensor([scores], dtype=torch.float32), top_k)[0].tolist()
    assert chosen == sorted(range(6), key=lambda expert: (-scores[expert], expert))[:top_k]


ID, WEIGHT = torch.int64, torch.float32


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([[0, 1]], [[0.5]], "must both be (T, K)"),
        ([[0, 9]], [[0.5, 0.5]], "must be -1 or in [0, 4)"),
        ([[0, -2]], [[0.5, 0.0]], "must be -1 or in [0, 4)"),
        ([[0, -1]], [[0.5, 0.5]], "unused slots (id -1) must have weight 0"),
        ([[0, 1]], [[0.5, float("nan")]], "must be finite"),
        ([[2, 2]], [[0.5, 0.5]], "may visit an expert only once"),
        ([[2, 1]], [[0.5, 0.5]], "in ascending order of experts, unused ones last"),
        ([[-1, 1]], [[0.0, 0.5]], "in ascending order of experts, unused ones last"),
    ],
)
def test_broken_invariants_are_named(
    ids: list[list[int]], weights: list[list[float]], message: str
) -> None:
    routing = Routing(torch.tensor(ids, dtype=ID), torch.tensor(weights, dtype=WEIGHT))
    with pytest.raises(RoutingError, match=re.escape(message)):
        routing.validate(4)


def test_wrong_dtypes_are_named() -> None:
    with pytest.raises(RoutingError, match=r"must be int64 and weights float32; got torch.int32"):
        Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)).validate(2)
