"""Residents in place of missing experts, against a slow oracle."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import RoutingError
from tests.routing.policy_cases import (
    E,
    context,
    made,
    parse,
    same,
    seeds,
    sizes,
    table_of,
)


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
    chain = parse(f"resident:{margin}")
    same(chain(routing, context(scores, rule, resident=resident)), expected)


def test_residents_change_nothing_where_all_are_there() -> None:
    scores, rule, routing = made(3, 5)
    chain = parse("resident:0.5")
    assert chain(routing, context(scores, rule)) is routing
    everyone = torch.ones(E, dtype=torch.bool)
    assert chain(routing, context(scores, rule, resident=everyone)) is routing
    assert chain.needs == {"select", "resident"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resident:-0.1", "write resident:MARGIN with a share in [0, 1]"),
    ],
)
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        parse(spec)
