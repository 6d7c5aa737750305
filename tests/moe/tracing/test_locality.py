"""Locality of routing: golden values of the law, and brute force on small traces."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.commands.trace import findings as locality
from moe.commands.trace.findings import Ids

E, K = 6, 2

# N/E at t = 1, 4, 8, 16, 32, 64, 128.
GOLDEN = {
    (8, 2): (0.25, 0.68, 0.90, 0.99, 1, 1, 1),
    (32, 4): (0.125, 0.41, 0.66, 0.88, 0.99, 1, 1),
    (60, 4): (0.067, 0.24, 0.42, 0.67, 0.89, 0.99, 1),
    (64, 6): (0.094, 0.33, 0.55, 0.79, 0.96, 1, 1),
    (128, 8): (0.062, 0.23, 0.40, 0.64, 0.87, 0.98, 1),
    (256, 8): (0.031, 0.12, 0.22, 0.40, 0.64, 0.87, 0.98),
}


@pytest.mark.parametrize(("size", "shares"), GOLDEN.items())
def test_the_law_has_its_golden_values(size: tuple[int, int], shares: tuple[float, ...]) -> None:
    experts, top_k = size
    for tokens, share in zip((1, 4, 8, 16, 32, 64, 128), shares, strict=True):
        found = locality.law(experts, top_k, tokens) / experts
        digits = len(str(share).partition(".")[2])
        assert abs(found - share) <= 0.5 * 10**-digits + 1e-3, (experts, top_k, tokens)


@pytest.mark.parametrize(
    ("size", "tokens"), list(zip(GOLDEN, (11, 23, 44, 31, 47, 95), strict=True))
)
def test_tokens_until_nearly_every_expert_is_needed(size: tuple[int, int], tokens: int) -> None:
    experts, top_k = size
    assert locality.law(experts, top_k, tokens - 1) < 0.95 * experts
    assert locality.law(experts, top_k, tokens) >= 0.95 * experts


def test_one_number_of_the_law() -> None:
    assert locality.law(64, 6, 16) == pytest.approx(50.75, abs=0.005)


def even_routing(tokens: int, experts: int, top_k: int) -> Ids:
    rng = np.random.default_rng(0)
    return np.sort(rng.random((tokens, experts)).argsort(1)[:, :top_k], 1)


def test_even_routing_follows_the_law_within_two_per_cent() -> None:
    ids = even_routing(64_000, 64, 6)
    for tokens in (1, 4, 16, 64):
        expected = locality.law(64, 6, tokens)
        assert locality.distinct(ids, [64_000], tokens, 64) == pytest.approx(expected, rel=0.02)
        assert locality.distinct_apart(ids, tokens, 64) == pytest.approx(expected, rel=0.02)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Ids, list[int]]:
    """Expert ids, some slots unused, and lengths of sequences."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    row = st.lists(st.integers(0, E - 1), min_size=0, max_size=K, unique=True)
    rows = [sorted(draw(row)) for _ in range(sum(lengths))]
    return np.array([r + [-1] * (K - len(r)) for r in rows]), lengths


def runs_of(ids: Ids, lengths: list[int], tokens: int) -> list[list[int]]:
    """Visits of each whole run, one expert after the other."""
    found, start = [], 0
    for length in lengths:
        for at in range(start, start + length - tokens + 1, tokens):
            found.append([e for row in ids[at : at + tokens].tolist() for e in row if e >= 0])
        start += length
    return found


@given(traces(), st.integers(1, 5))
def test_distinct_experts_of_runs(trace: tuple[Ids, list[int]], tokens: int) -> None:
    ids, lengths = trace
    runs = runs_of(ids, lengths, tokens)
    found = locality.distinct(ids, lengths, tokens, E)
    if runs:
        assert found == pytest.approx(sum(len(set(run)) for run in runs) / len(runs))
    else:
        assert math.isnan(found)


@given(traces(), st.integers(1, 4), st.integers(1, E))
def test_an_oracles_cache_holds_what_a_run_needs_most(
    trace: tuple[Ids, list[int]], tokens: int, slots: int
) -> None:
    ids, lengths = trace
    runs = runs_of(ids, lengths, tokens)
    counts = locality.visits(ids, lengths, tokens, E)
    total = sum(map(len, runs))
    hits = sum(
        max(sum(run.count(e) for e in held) for held in combinations(range(E), slots))
        for run in runs
    )
    found = locality.cache_best_hits(counts, slots)
    assert found == pytest.approx(hits / total) if total else math.isnan(found)


@given(traces(), st.integers(1, 3))
def test_the_best_score_of_one_set_for_a_run(trace: tuple[Ids, list[int]], tokens: int) -> None:
    ids, lengths = trace
    runs = runs_of(ids, lengths, tokens)
    best = []
    for run in runs:
        scores = []
        for size in range(1, E + 1):
            for chosen in combinations(range(E), size):
                hits = sum(e in chosen for e in run)
                precision, recall = hits / (tokens * size), hits / max(len(run), 1)
                both = precision + recall
                scores.append(2 * precision * recall / both if both else 0.0)
        best.append(max(scores))
    found = locality.routing_best_score(locality.visits(ids, lengths, tokens, E), tokens)
    assert found == pytest.approx(np.mean(best)) if best else math.isnan(found)


@given(traces(), st.sampled_from([0.5, 1.0, 1.25]), st.integers(1, 4))
def test_who_comes_last_finds_an_expert_full(
    trace: tuple[Ids, list[int]], factor: float, parts: int
) -> None:
    ids, lengths = trace
    over, total, start = [0] * parts, [0] * parts, 0
    for length in lengths:
        rows = ids[start : start + length].tolist()
        start += length
        capacity = math.ceil(factor * sum(e >= 0 for row in rows for e in row) / E)
        used: Counter[int] = Counter()
        for place, row in enumerate(rows):
            for expert in (e for e in row if e >= 0):
                part = place * parts // length
                total[part] += 1
                over[part] += used[expert] >= capacity
                used[expert] += 1
    found = locality.overflow(ids, lengths, E, factor, parts)
    assert found.tolist() == pytest.approx(
        [o / max(t, 1) for o, t in zip(over, total, strict=True)]
    )


def test_more_overflows_towards_the_end() -> None:
    ids = even_routing(512, 32, 4)
    share = locality.overflow(ids, [512], 32, 1.0, 4)
    assert share[0] == 0
    assert share[3] > share[2] >= share[1]


@given(traces())
def test_how_often_experts_meet(trace: tuple[Ids, list[int]]) -> None:
    ids, _ = trace
    lift = locality.coactivation_lift(ids, E)
    rows = [set(row) - {-1} for row in ids.tolist()]
    for a in range(E):
        for b in range(E):
            alone = sum(a in row for row in rows) * sum(b in row for row in rows)
            both = sum({a, b} <= row for row in rows)
            if a == b or not alone:
                assert math.isnan(lift[a, b])
            else:
                assert lift[a, b] == pytest.approx(both * len(rows) / alone)
