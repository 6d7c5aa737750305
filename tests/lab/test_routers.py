"""Routers and what balances them, against loops over plain numbers and known figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.routers.routers import (
    balanced_routing,
    bias_step,
    dual_rate,
    mixed_scores,
    neighbour_scores,
    relu_routing,
    sinkhorn,
    size_routing,
)
from routing.routers import RouterRule

pytestmark = pytest.mark.deep


EXPERTS = 10
SEEDS = st.integers(0, 1 << 30)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.sampled_from([-5.0, -0.5, 0.0, 5.0]))
def test_relu_visits_every_expert_with_a_positive_logit(seed: int, shift: float) -> None:
    logits, scale = drawn(seed, 4, EXPERTS) + shift, drawn(seed + 1, EXPERTS)
    routing = relu_routing(logits, scale).validate(EXPERTS)
    rows = zip(logits.tolist(), routing.expert_ids.tolist(), routing.weights.tolist(), strict=True)
    for row, ids, weights in rows:
        active = [e for e in range(EXPERTS) if row[e] > 0]
        size = math.sqrt(sum(row[e] ** 2 for e in active) / EXPERTS + 1e-6)
        assert [i for i in ids if i >= 0] == active
        expected = [row[e] / size * float(scale[e]) for e in active]
        assert weights[: len(active)] == pytest.approx(expected, rel=1e-4)
    assert routing.top_k == max(1, int((logits > 0).sum(1).max()))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_a_size_is_all_of_its_experts(chosen: list[int]) -> None:
    weights = drawn(0, len(chosen)).abs()
    routing = size_routing(torch.tensor(chosen), weights, [range(8), [8], []]).validate(9)
    members = {0: list(range(8)), 1: [8], 2: []}
    for choice, weight, ids, own in zip(
        chosen, weights, routing.expert_ids.tolist(), routing.weights.tolist(), strict=True
    ):
        assert [i for i in ids if i >= 0] == members[choice]
        assert sum(own) == pytest.approx(float(weight) * len(members[choice]), rel=1e-5)


@given(SEEDS, st.integers(1, 3))
def test_neighbours_are_those_before(seed: int, heads: int) -> None:
    tokens, size = 5, 4
    scores = drawn(seed, tokens, EXPERTS).softmax(-1)
    queries, keys = drawn(seed + 1, 2, heads, tokens, size)
    shares = drawn(seed + 2, heads).softmax(0)
    theirs = neighbour_scores(scores, queries, keys, shares)
    for t in range(tokens):
        row = torch.zeros(EXPERTS)
        for a in range(heads):
            seen = [float(queries[a, t] @ keys[a, s]) / size**0.5 for s in range(t + 1)]
            total = sum(map(math.exp, seen))
            for s, affinity in enumerate(seen):
                row += float(shares[a]) * math.exp(affinity) / total * scores[s]
        assert torch.allclose(theirs[t], row, atol=1e-5)
    assert torch.allclose(theirs[0], scores[0], atol=1e-6)
    mixed = mixed_scores(scores, theirs, 0.25)
    assert torch.allclose(mixed.sum(-1), torch.ones(tokens), atol=1e-5)
    assert torch.allclose(mixed, 0.75 * scores + 0.25 * theirs)


@given(SEEDS, st.sampled_from([2.0, 0.5, 0.1]))
def test_a_plan_is_balanced_and_the_best(seed: int, temperature: float) -> None:
    worth = drawn(seed, 24, 6)
    plan = sinkhorn(worth, temperature, max_rounds=20_000, tolerance=1e-5).shares
    assert torch.allclose(plan.sum(1), torch.ones(24), atol=1e-5)
    assert torch.allclose(plan.sum(0), torch.full((6,), 4.0), atol=1e-3)
    # The optimum is the only plan whose logarithm is worth / temperature + rows + columns.
    rest = plan.double().log() - worth.double() / temperature
    rest = rest - rest.mean(0) - rest.mean(1, keepdim=True) + rest.mean()
    sure = plan > 1e-30
    assert float(rest[sure].abs().max()) < 1e-2 or not bool(sure.all())


ROUNDS = {
    "logits": {2.0: 4, 1.0: 5, 0.5: 10, 0.1: 74, 0.05: 140},
    "softmax": {2.0: 2, 1.0: 2, 0.5: 3, 0.1: 9, 0.05: 28, 0.01: 175},
}
"""Golden values for 256 tokens and 16 experts, to 1e-4."""


@pytest.mark.parametrize("worth", ROUNDS)
def test_rounds_to_balance_are_those_written_down(worth: str) -> None:
    logits = drawn(0, 256, 16)
    for temperature, expected in ROUNDS[worth].items():
        rows = logits if worth == "logits" else logits.softmax(-1)
        rounds = sinkhorn(rows, temperature, max_rounds=1000).rounds
        assert expected / 2.5 <= rounds <= expected * 1.5 + 1, temperature
    assert sinkhorn(logits, 0.01).rounds == 100, "does not converge in the rounds allowed"


def max_violation(tokens: Tensor) -> float:
    return float(tokens.max() / tokens.float().mean() - 1)


def test_a_balanced_plan_makes_choices_more_even_and_not_even() -> None:
    logits = drawn(1, 256, 16) + drawn(2, 16)
    plain = RouterRule(2).select(logits.softmax(-1))
    balanced = balanced_routing(sinkhorn(logits, 0.5), 2).validate(16)
    before, after = (max_violation(r.tokens_per_expert(16)) for r in (plain, balanced))
    assert before > 1.5
    assert 0.05 < after < 0.6
    both = (plain.expert_ids[:, :, None] == balanced.expert_ids[:, None]).any(-1)
    assert 0.3 < float(both.float().mean()) < 0.8
    assert torch.allclose(balanced.weights.sum(1), torch.ones(256), atol=1e-5)


def balanced_loads(
    rate: Callable[[int], float], step: str, steps: int
) -> tuple[list[float], float]:
    """MaxVio of each step and of the last 200 together, on skewed scores."""
    experts, generator = 32, torch.Generator().manual_seed(0)
    skew, bias = torch.randn(experts, generator=generator), torch.zeros(experts)
    each, last = [], torch.zeros(experts)
    for index in range(steps):
        scores = torch.sigmoid(torch.randn(512, experts, generator=generator) + skew)
        tokens = RouterRule(4, "sigmoid", bias).select(scores).tokens_per_expert(experts)
        bias = bias_step(bias, tokens, rate(index + 1), step)  # type: ignore[arg-type]
        each.append(max_violation(tokens))
        last += tokens if index >= steps - 200 else 0
    return each, max_violation(last)


@pytest.mark.parametrize(
    ("rate", "step", "batch", "overall"),
    [
        (lambda _: 1e-2, "sign", 0.35, 0.02),
        (lambda _: 1e-3, "sign", 0.26, 0.02),
        (lambda _: 1e-2, "error", 0.27, 0.01),
        (lambda t: dual_rate(t, 0.5), "error", 0.26, 0.01),
    ],
)
def test_bias_steps_balance_down_to_the_noise_of_sampling(
    rate: Callable[[int], float], step: str, batch: float, overall: float
) -> None:
    each, last = balanced_loads(rate, step, steps=1000)
    assert each[0] > 2
    assert sum(each[-200:]) / 200 == pytest.approx(batch, abs=0.04)
    assert last < overall


@given(SEEDS, st.sampled_from(["sign", "error"]))
def test_a_bias_moves_from_the_overloaded_to_the_underloaded(seed: int, step: str) -> None:
    tokens = torch.randint(0, 9, (EXPERTS,), generator=torch.Generator().manual_seed(seed))
    bias = drawn(seed, EXPERTS)
    moved = bias_step(bias, tokens, 0.1, step) - bias  # type: ignore[arg-type]
    short = tokens.float().mean() - tokens
    assert bool((moved * short >= 0).all())
    assert bool((moved[short != 0] != 0).all())


@given(SEEDS, st.sampled_from(["sign", "error"]), st.integers(1, 100))
def test_a_bias_step_is_what_its_definition_says(seed: int, step: str, index: int) -> None:
    tokens = torch.randint(0, 9, (EXPERTS,), generator=torch.Generator().manual_seed(seed))
    bias, rate = drawn(seed, EXPERTS), dual_rate(index, 0.5)
    assert rate == pytest.approx(2 / index)
    mean = sum(tokens.tolist()) / EXPERTS
    short = [(mean - count) / max(mean, 1e-9) for count in tokens.tolist()]
    signs = [(value > 0) - (value < 0) for value in short]
    expected = zip(bias.tolist(), signs if step == "sign" else short, strict=True)
    moved = bias_step(bias, tokens, rate, step)  # type: ignore[arg-type]
    assert moved.tolist() == pytest.approx([b + rate * by for b, by in expected], abs=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_a_bias_that_balances_gives_the_best_balanced_assignment(seed: int) -> None:
    """It is the price of the dual problem; beside it, all assignments."""
    scores, bias = drawn(seed, 6, 3).sigmoid(), torch.zeros(3)
    for index in range(2000):
        chosen = RouterRule(1, "sigmoid", bias).select(scores)
        tokens = chosen.tokens_per_expert(3)
        if tokens.tolist() == [2, 2, 2]:
            break
        bias = bias_step(bias, tokens, dual_rate(index + 1, 2.0), "error")
    else:
        pytest.fail(f"{tokens.tolist()} after 2000 steps")
    best = max(
        sum(float(scores[token, expert]) for token, expert in enumerate(each))
        for each in set(permutations([0, 0, 1, 1, 2, 2]))
    )
    assert float(chosen.weights.sum()) == pytest.approx(best, abs=1e-5)


UNIQUE = {
    (8, 2): [0.25, 0.68, 0.90, 0.99, 1, 1, 1],
    (32, 4): [0.125, 0.41, 0.66, 0.88, 0.99, 1, 1],
    (60, 4): [0.067, 0.24, 0.42, 0.67, 0.89, 0.99, 1],
    (64, 6): [0.094, 0.33, 0.55, 0.79, 0.96, 1, 1],
    (128, 8): [0.062, 0.23, 0.40, 0.64, 0.87, 0.98, 1],
    (256, 8): [0.031, 0.12, 0.22, 0.40, 0.64, 0.87, 0.98],
}
"""Share of experts that 1, 4, 8, 16, 32, 64, 128 tokens visit."""


@pytest.mark.parametrize(("experts", "top_k"), UNIQUE)
def test_a_random_router_visits_experts_by_the_law(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rule = RouterRule(top_k)
    for tokens, expected in zip((1, 4, 8, 16, 32, 64, 128), UNIQUE[experts, top_k], strict=True):
        law = 1 - (1 - top_k / experts) ** tokens
        assert law == pytest.approx(expected, abs=0.0051)
        trials = max(4096 // tokens, 60)
        scores = torch.rand(trials * tokens, experts, generator=generator)
        ids = rule.select(scores).expert_ids.view(trials, -1)
        seen = torch.zeros(trials, experts).scatter(1, ids, 1.0).mean()
        assert float(seen) == pytest.approx(law, rel=0.02)
