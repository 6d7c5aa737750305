"""Routers' decisions as tables, for tests of policies against slow oracles."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from moe.hooks import Registry
from routing import Phase, PolicyChain, Routing, RoutingContext, parse_policies
from routing.policies import ParsePolicy
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
    scores: Tensor, rule: RouterRule, phase: Phase = "decode", resident: Tensor | None = None
) -> RoutingContext:
    return RoutingContext(0, E, phase, scores, partial(rule.select, scores), resident)


def scaled(kept: dict[int, float], before: dict[int, float]) -> dict[int, float]:
    factor = sum(before.values()) / sum(kept.values()) if kept else 0.0
    return {e: w * factor for e, w in kept.items()}


def parse(*specs: str, lossless: bool = False) -> PolicyChain:
    """A chain of policies, those of methods too."""
    return parse_policies(specs, lossless=lossless, more=Registry[ParsePolicy]("routing.policies"))


seeds, sizes, runs = st.integers(0, 10_000), st.integers(0, 20), st.integers(1, 9)
