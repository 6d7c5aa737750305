"""Dynamic expert sharing against slow oracles written from the paper."""

from __future__ import annotations

import math
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
    runs,
    same,
    scaled,
    seeds,
    sizes,
    table_of,
)


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
    chain = parse(f"des_seq:{top_k}:{size}")
    same(chain(routing, context(scores, rule)), expected)


@given(seeds, sizes, runs, st.floats(0.05, 1), st.sampled_from([1, 2]), st.booleans())
def test_vote_shares_what_the_run_wants_most(
    seed: int, tokens: int, size: int, share: float, power: int, renormalise: bool
) -> None:
    scores, rule, routing = made(seed, tokens, renormalise)
    before, expected = table_of(routing), []
    chain = parse(f"des_vote:{share}:{size}:{power}")
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
    chain = parse("des_vote:0.1:8", "des_seq:1:8")
    assert chain.needs == {"select"}
    assert chain(routing, context(scores, rule, "prefill")) is routing


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("des_vote:0.5", "write des_vote:SHARE:TOKENS[:POWER] with shares in (0, 1] of"),
        ("des_seq:0:8", "write des_seq:K:TOKENS with whole numbers >= 1"),
        ("des_seq:2:-8", "policy 'des_seq:2:-8' is not valid"),
    ],
)
def test_wrong_arguments(spec: str, message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        parse(spec)
