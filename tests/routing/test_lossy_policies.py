"""Lossy serving policies, each against a slow oracle written from its definition."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from routing import Phase, Routing, RoutingContext, RoutingError, parse_policies
from routing.policies.pruning import OnlineDynamicPruning
from routing.routers import RouterRule

E, K = 12, 3
TABLE = list[dict[int, float]]
"""Of each token, the weight of each of its experts."""


def table_of(routing: Routing) -> TABLE:
    rows = zip(routing.expert_ids.tolist(), routing.weights.tolist(), strict=True)
    return [{e: w for e, w in zip(*row, strict=True) if e >= 0} for row in rows]


def same(found: Routing, expected: TABLE) -> None:
    found.validate(E)
    for own, other in zip(table_of(found), expected, strict=True):
        assert own.keys() == other.keys()
        assert [own[e] for e in own] == pytest.approx([other[e] for e in own], rel=1e-5)


def made(seed: int, tokens: int, renormalise: bool = True) -> tuple[Tensor, RouterRule, Routing]:
    """Scores of a softmax router, its rule, and its decision."""
    generator = torch.Generator().manual_seed(seed)
    rule = RouterRule(K, renormalise=renormalise)
    scores = rule.scores(2 * torch.randn(tokens, E, generator=generator))
    return scores, rule, rule.select(scores)


def context(
    scores: Tensor,
    rule: RouterRule,
    phase: Phase = "decode",
    resident: Tensor | None = None,
    importance: Tensor | None = None,
) -> RoutingContext:
    return RoutingContext(0, E, phase, scores, partial(rule.select, scores), resident, importance)


def scaled(kept: dict[int, float], before: dict[int, float]) -> dict[int, float]:
    factor = sum(before.values()) / sum(kept.values()) if kept else 0.0
    return {e: w * factor for e, w in kept.items()}


seeds, sizes, runs = st.integers(0, 10_000), st.integers(0, 20), st.integers(1, 9)


@given(seeds, sizes, runs, st.integers(1, 5), st.booleans())
def test_seq_shares_what_each_token_wants_most(
    seed: int, tokens: int, size: int, top_k: int, renormalise: bool
) -> None:
    scores, rule, routing = made(seed, tokens, renormalise)
    before, expected = table_of(routing), []
    for start in range(0, tokens, size):
        run = before[start : start + size]
        core = {e for row in run for e in sorted(row, key=lambda e: -row[e])[:top_k]}
        for row, own in zip(run, scores[start : start + size].tolist(), strict=True):
            chosen = sorted(core, key=lambda e: -own[e])[:K]
            expected.append(scaled({e: own[e] for e in chosen}, row))
    chain = parse_policies([f"des_seq:{top_k}:{size}"], lossless=False)
    same(chain(routing, context(scores, rule)), expected)


@given(seeds, sizes, runs, st.floats(0.05, 1), st.sampled_from([1, 2]), st.booleans())
def test_vote_shares_what_the_run_wants_most(
    seed: int, tokens: int, size: int, share: float, power: int, renormalise: bool
) -> None:
    scores, rule, routing = made(seed, tokens, renormalise)
    before, expected = table_of(routing), []
    chain = parse_policies([f"des_vote:{share}:{size}:{power}"], lossless=False)
    for start in range(0, tokens, size):
        run = before[start : start + size]
        votes = [sum(row.get(e, 0.0) ** power for row in run) for e in range(E)]
        count = max(math.ceil(share * E), K)
        core = sorted(range(E), key=lambda e: -votes[e])[:count]
        for row, own in zip(run, scores[start : start + size].tolist(), strict=True):
            chosen = sorted(core, key=lambda e: -own[e])[:K]
            expected.append(scaled({e: own[e] for e in chosen}, row))
    same(chain(routing, context(scores, rule)), expected)


def test_prompts_do_not_share() -> None:
    scores, rule, routing = made(1, 8)
    chain = parse_policies(["des_vote:0.1:8", "des_seq:1:8"], lossless=False)
    assert chain.needs == {"select"}
    assert chain(routing, context(scores, rule, "prefill")) is routing


@given(seeds, sizes, st.floats(0.01, 1))
def test_top_p_keeps_the_heaviest_until_the_share_is_reached(
    seed: int, tokens: int, share: float
) -> None:
    scores, rule, routing = made(seed, tokens)
    expected = []
    for row in table_of(routing):
        kept: dict[int, float] = {}
        for expert in sorted(row, key=lambda e: -row[e]):
            if not kept or sum(kept.values()) < share * sum(row.values()) - 1e-6:
                kept[expert] = row[expert]
        expected.append(scaled(kept, row))
    found = parse_policies([f"top_p:{share}"], lossless=False)(routing, context(scores, rule))
    if not any(abs(sum(kept.values()) - share) < 1e-4 for kept in expected):
        same(found, expected)


@given(seeds, sizes, st.floats(0, 1), st.sampled_from([0.0, 0.2, 0.5]))
def test_odp_spares_the_important(seed: int, tokens: int, ratio: float, protected: float) -> None:
    scores, rule, routing = made(seed, tokens)
    importance = torch.rand(tokens, generator=torch.Generator().manual_seed(seed))
    count = int(protected * tokens)
    spared = sorted(range(tokens), key=lambda t: -float(importance[t]))[:count]
    expected = [
        row
        if token in spared
        else scaled({e: w for e, w in row.items() if w >= ratio * max(row.values())}, row)
        for token, row in enumerate(table_of(routing))
    ]
    chain = parse_policies([f"odp:{ratio:.9g}:{protected}"], lossless=False)
    same(chain(routing, context(scores, rule, "prefill", importance=importance)), expected)


def test_odp_with_a_ratio_for_each_layer() -> None:
    policy = OnlineDynamicPruning.parse(["0.3,0.6"])
    assert policy.spec == "odp:0.3,0.6:0.02"
    policy.check(2)
    with pytest.raises(RoutingError, match="has numbers for 2 MoE layers, and the model has 3"):
        policy.check(3)
    routing = Routing(torch.tensor([[1, 2]]), torch.tensor([[0.4, 0.8]]))
    for layer, kept in ((0, [1, 2]), (1, [2, -1])):
        found = policy(routing, RoutingContext(layer, E, "decode"))
        assert found.expert_ids.tolist() == [kept]


@given(seeds, sizes, st.floats(0.05, 1))
def test_pesf_skips_what_few_tokens_of_a_prompt_want(seed: int, tokens: int, share: float) -> None:
    scores, rule, routing = made(seed, tokens)
    before = table_of(routing)
    visits = [sum(e in row for row in before) for e in range(E)]
    often = {e for e in range(E) if visits[e] >= share * tokens * K / E}
    expected = [scaled({e: w for e, w in row.items() if e in often}, row) for row in before]
    chain = parse_policies([f"pesf:{share}"], lossless=False)
    same(chain(routing, context(scores, rule, "prefill")), expected)
    assert chain(routing, context(scores, rule, "decode")) is routing


@given(seeds, sizes, st.floats(0, 1), st.sets(st.integers(0, E - 1)))
def test_residents_replace_the_missing_within_the_margin(
    seed: int, tokens: int, margin: float, there: set[int]
) -> None:
    scores, rule, routing = made(seed, tokens)
    resident = torch.tensor([e in there for e in range(E)])
    expected = []
    for row, own in zip(table_of(routing), scores.tolist(), strict=True):
        chosen = set(row)
        missing = sorted(chosen - there, key=lambda e: own[e])
        spare = sorted(there - chosen, key=lambda e: -own[e])
        for lost, gained in zip(missing, spare, strict=False):
            if own[gained] >= own[lost] * (1 - margin):
                chosen = chosen - {lost} | {gained}
        total = sum(own[e] for e in chosen)
        expected.append({e: own[e] / total for e in chosen})
    chain = parse_policies([f"resident:{margin}"], lossless=False)
    same(chain(routing, context(scores, rule, resident=resident)), expected)


def test_residents_change_nothing_where_all_are_there() -> None:
    scores, rule, routing = made(3, 5)
    chain = parse_policies(["resident:0.5"], lossless=False)
    assert chain(routing, context(scores, rule)) is routing
    everyone = torch.ones(E, dtype=torch.bool)
    assert chain(routing, context(scores, rule, resident=everyone)) is routing
    assert chain.needs == {"select", "resident"}
