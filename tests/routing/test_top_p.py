"""`top_p` against a slow oracle written from its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.routing.policy_cases import context, made, parse, same, scaled, seeds, sizes, table_of


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
    found = parse(f"top_p:{share}")(routing, context(scores, rule))
    if not any(abs(sum(kept.values()) - share) < 1e-4 for kept in expected):
        same(found, expected)
