"""Replays: against the cache itself, and against the best there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.cache import ExpertCache
from offload.policies import POLICIES
from offload.replay import calls_of, hit_ratio
from offload.slots import SlotSizes
from tests.offload.cache_cases import FakeRoom, FakeSource
from tests.oracles.replay_bounds import RandomChoice, belady

LAYERS, WIDTH = 3, 8


def traces(most: int = 3) -> st.SearchStrategy[list[list[int]]]:
    call = st.sets(st.integers(0, WIDTH - 1), min_size=1, max_size=most).map(sorted)
    return st.lists(call, min_size=3, max_size=40).map(
        lambda calls: [
            [number % LAYERS * WIDTH + expert for expert in experts]
            for number, experts in enumerate(calls)
        ]
    )


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(calls=traces(), slots=st.integers(6, 20))
def test_a_replay_hits_what_the_cache_hits(name: str, calls: list[list[int]], slots: int) -> None:
    room = FakeRoom(slots)
    source = FakeSource(room, at_once=True)
    policy = POLICIES[name](LAYERS, WIDTH)
    cache = ExpertCache(SlotSizes.equal([WIDTH] * LAYERS, 12), slots, room, source, policy)
    for units in calls:
        with cache.acquire(units[0] // WIDTH, [unit % WIDTH for unit in units]) as held:
            assert len(list(held.rounds)) >= 1
    # Equal values may go in any order, and what is lent a slot stays in it until somebody else
    # needs one: only the sums are alike.
    ratio = hit_ratio(calls, slots, POLICIES[name](LAYERS, WIDTH), WIDTH)
    asked = sum(map(len, calls))
    assert abs(cache.statistics.total.hits - ratio * asked) <= max(5, 0.25 * asked)


@given(calls=traces(), slots=st.integers(6, 20))
def test_nothing_beats_belady(calls: list[list[int]], slots: int) -> None:
    best = belady(calls, slots)
    for make in (*POLICIES.values(), RandomChoice):
        assert hit_ratio(calls, slots, make(LAYERS, WIDTH), WIDTH) <= best + 1e-9


@given(calls=traces(), slots=st.integers(6, 20))
def test_who_foresees_everything_is_belady(calls: list[list[int]], slots: int) -> None:
    rest = POLICIES["lru"](LAYERS, WIDTH)
    assert belady(calls, slots, len(calls), rest, WIDTH) == pytest.approx(belady(calls, slots))
    nothing = belady(calls, slots, 0, POLICIES["lru"](LAYERS, WIDTH), WIDTH)
    assert nothing == hit_ratio(calls, slots, POLICIES["lru"](LAYERS, WIDTH), WIDTH)


def best_of_all(calls: list[list[int]], slots: int) -> int:
    """Hits of the best choice of victims, found by trying all."""
    states = {frozenset[int](): 0}
    for units in calls:
        after: dict[frozenset[int], int] = {}
        for state, hits in states.items():
            now = hits + len(state & set(units))
            present = state | set(units)
            for kept in map(frozenset, combinations(present, min(slots, len(present)))):
                after[kept] = max(after.get(kept, 0), now)
        states = after
    return max(states.values())


@settings(max_examples=30)
@given(calls=traces(2), slots=st.integers(2, 5))
def test_belady_is_the_best_of_all(calls: list[list[int]], slots: int) -> None:
    short = calls[:12]
    asked = sum(map(len, short))
    assert round(belady(short, slots) * asked) == best_of_all(short, slots)


def test_calls_join_the_sequences_of_a_batch() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[1, 4], [2, -1]], [[5, 6], [0, 1]], [[5, 7], [0, 2]]])
    assert calls_of(experts, 8)[:2] == [[0, 1], [10, 11]]
    assert calls_of(experts, 8, batch=2) == [[0, 1, 5, 6], [8, 9, 10, 11], [1, 4, 5, 7], [8, 10]]
