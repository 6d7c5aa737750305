"""The rule of a router against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from routing import Routing
from routing.routers import RouterRule

EXPERTS = 12
GROUPINGS = [(1, 1), (4, 2), (3, 1), (6, 5)]


@st.composite
def cases(draw: Any) -> tuple[RouterRule, Tensor, Tensor | None, int | None]:
    """A rule, logits, and what it may choose from: all, some for everybody, some for each row."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    correction = 0.3 * torch.randn(EXPERTS, generator=generator) if draw(st.booleans()) else None
    groups, kept = draw(st.sampled_from(GROUPINGS))
    rule = RouterRule(
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["softmax", "sigmoid"])),
        correction,
        groups,
        kept,
        group_score=draw(st.sampled_from(["max", "top2"])),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    logits = 2 * torch.randn(3, EXPERTS, generator=generator)
    shape = draw(st.sampled_from([None, (EXPERTS,), (3, EXPERTS)]))
    share = draw(st.sampled_from([0.0, 0.3, 0.9]))
    allowed = None if shape is None else torch.rand(shape, generator=generator) < share
    return rule, logits, allowed, draw(st.sampled_from([None, 1, 7, EXPERTS]))


def expected_row(
    rule: RouterRule, logits: list[float], allowed: list[bool], top_k: int
) -> dict[int, float]:
    """Expert -> weight of one row, by the definition."""
    if rule.score == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    bias = [0.0] * EXPERTS if rule.correction is None else rule.correction.tolist()
    value = [s + b for s, b in zip(scores, bias, strict=True)]
    size = EXPERTS // rule.groups
    members = [
        [e for e in range(g * size, (g + 1) * size) if allowed[e]] for g in range(rule.groups)
    ]
    best = 1 if rule.group_score == "max" else 2
    worth = [sum(sorted((value[e] for e in m), reverse=True)[:best]) for m in members]
    groups = sorted((g for g in range(rule.groups) if members[g]), key=lambda g: (-worth[g], g))
    reach = [e for g in groups[: rule.groups_kept] for e in members[g]]
    chosen = sorted(reach, key=lambda e: (-value[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) if rule.renormalise else 1.0
    return {e: rule.scale * scores[e] / total for e in chosen}


def check(routing: Routing, expected: list[dict[int, float]], top_k: int) -> None:
    routing.validate(EXPERTS)
    assert routing.top_k == min(top_k, EXPERTS)
    for ids, weights, row in zip(
        routing.expert_ids.tolist(), routing.weights.tolist(), expected, strict=True
    ):
        used = {i: w for i, w in zip(ids, weights, strict=True) if i >= 0}
        assert used == pytest.approx(row, rel=1e-4)


@given(cases())
def test_a_choice_is_what_its_definition_says(case: Any) -> None:
    rule, logits, allowed, top_k = case
    everybody = torch.ones(EXPERTS, dtype=torch.bool) if allowed is None else allowed
    rows = everybody.expand(3, EXPERTS).tolist()
    count = rule.top_k if top_k is None else top_k
    expected = [
        expected_row(rule, row, may, count) for row, may in zip(logits.tolist(), rows, strict=True)
    ]
    check(rule.select(rule.scores(logits), allowed, top_k), expected, count)


@given(st.integers(0, 1 << 30), st.integers(1, 4), st.sampled_from([0.02, 0.2, 1.0]))
def test_a_mixer_weighs_by_those_left_that_come_near(seed: int, top_k: int, near: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, EXPERTS, generator=generator)
    allowed = torch.rand(EXPERTS, generator=generator) < 0.7
    rule = RouterRule(top_k, "mixer", scale=0.5, mixer_threshold=near)
    expected = []
    for row in logits.tolist():
        left = [e for e in range(EXPERTS) if allowed[e]]
        chosen: dict[int, float] = {}
        while left and len(chosen) < top_k:
            best = max(left, key=lambda e: row[e])
            close = [e for e in left if (row[best] - row[e]) / max(abs(row[e]), row[best]) <= near]
            chosen[best] = 0.5 / sum(math.exp(row[e] - row[best]) for e in close)
            left.remove(best)
        expected.append(chosen)
    check(rule.select(rule.scores(logits), allowed), expected, top_k)


def test_ties_go_to_the_lower_id() -> None:
    routing = RouterRule(3).select(torch.full((2, EXPERTS), 0.25))
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 2
    groups = RouterRule(2, groups=4, groups_kept=1).select(torch.full((1, EXPERTS), 0.25))
    assert groups.expert_ids.tolist() == [[0, 1]]


def test_logits_keep_the_order_where_nothing_is_added() -> None:
    assert RouterRule(2).keeps_order
    assert not RouterRule(2, correction=torch.zeros(EXPERTS)).keeps_order
    assert not RouterRule(2, groups=4, groups_kept=2).keeps_order
