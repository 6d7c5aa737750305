"""PESF against a slow oracle written from its definition."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import RoutingError
from tests.routing.policy_cases import (
    E,
    K,
    context,
    made,
    parse,
    same,
    scaled,
    seeds,
    sizes,
    table_of,
)


@given(seeds, sizes, st.floats(0.05, 1))
def test_pesf_skips_what_few_tokens_of_a_prompt_want(seed: int, tokens: int, share: float) -> None:
    scores, rule, routing = made(seed, tokens)
    before = table_of(routing)
    visits = [sum(e in row for row in before) for e in range(E)]
    often = {e for e in range(E) if visits[e] >= share * tokens * K / E}
    expected = [scaled({e: w for e, w in row.items() if e in often}, row) for row in before]
    chain = parse(f"pesf:{share}")
    same(chain(routing, context(scores, rule, "prefill")), expected)
    assert chain(routing, context(scores, rule, "decode")) is routing


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pesf", "policy 'pesf' is not valid; write pesf:SHARE"),
    ],
)
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        parse(spec)
