"""What policies value: each on a trace where it is known who is right."""

from __future__ import annotations

import numpy as np
import pytest

from offload.policies import POLICIES
from offload.replay import hit_ratio
from tests.oracles.replay_bounds import RandomChoice, belady

LAYERS, WIDTH = 4, 16


def popular(tokens: int, seed: int = 0) -> list[list[int]]:
    """Experts drawn by a steep popularity, the same at all times."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(1, WIDTH + 1)
    orders = [random.permutation(WIDTH) for _ in range(LAYERS)]
    return [
        sorted(layer * WIDTH + orders[layer][i] for i in choice)
        for _ in range(tokens)
        for layer in range(LAYERS)
        for choice in [random.choice(WIDTH, 2, replace=False, p=chances / chances.sum())]
    ]


def transitionual(tokens: int, seed: int = 0) -> list[list[int]]:
    """Every expert equally often, but one follows from the other."""
    random = np.random.default_rng(seed)
    following = random.permutation(WIDTH)
    state, calls = 0, []
    for _ in range(tokens):
        state = int(following[state]) if random.random() < 0.9 else int(random.integers(WIDTH))
        calls += [
            sorted({layer * WIDTH + state, layer * WIDTH + (state + 3) % WIDTH})
            for layer in range(LAYERS)
        ]
    return calls


def repeating(tokens: int, seed: int = 0) -> list[list[int]]:
    """The same popularity; every other expert is one of the token before."""
    random, calls = np.random.default_rng(seed), popular(tokens, seed)
    for at in range(LAYERS, len(calls)):
        if random.random() < 0.5:
            kept = calls[at - LAYERS][int(random.integers(2))]
            calls[at] = sorted([kept, next(unit for unit in calls[at] if unit != kept)])
    return calls


def ratios(calls: list[list[int]], slots: int) -> dict[str, float]:
    policies = {**POLICIES, "random": RandomChoice}
    found = {
        name: hit_ratio(calls, slots, make(LAYERS, WIDTH), WIDTH) for name, make in policies.items()
    }
    return found | {"belady": belady(calls, slots)}


def test_frequencies_win_where_popularity_rules() -> None:
    found = ratios(popular(300), 24)
    assert found["lfu"] > found["lru"] > found["random"]
    for name in ("frequency_recency", "forecast"):
        assert found[name] > found["lfu"] - 0.02


def test_transitions_win_where_one_expert_follows_from_another() -> None:
    found = ratios(transitionual(600), 24)
    others = max(found["lru"], found["lfu"], found["frequency_recency"])
    assert found["forecast"] > others + 0.25 * (found["belady"] - others)


def test_a_cache_smaller_than_a_pass_keeps_the_favourites_of_all_layers() -> None:
    """And not what comes soonest, layer by layer; six tokens at once want 30 units a pass."""
    one, batch, layers = popular(900), 6, range(LAYERS)
    calls = [
        sorted(set().union(*one[start + layer : start + batch * LAYERS : LAYERS]))
        for start in range(0, len(one), batch * LAYERS)
        for layer in layers
    ]
    found = ratios(calls, 8)
    for name in ("frequency_recency", "forecast"):
        assert found[name] > max(found["lru"], found["lfu"]) - 0.002


def test_what_repeats_itself_is_kept_as_well_as_what_is_popular() -> None:
    found = ratios(repeating(300), 16)
    for name in ("frequency_recency", "forecast"):
        assert found[name] > max(found["lru"], found["lfu"]) + 0.02


def test_frequency_recency_forgets() -> None:
    calls = popular(600, seed=1) + popular(600, seed=2)
    found = ratios(calls, 24)
    assert found["frequency_recency"] > found["lfu"]


@pytest.mark.parametrize("name", POLICIES)
def test_values_are_finite_whatever_has_been_seen(name: str) -> None:
    policy = POLICIES[name](LAYERS, WIDTH)
    assert np.isfinite(policy.values()).all()
    for _ in range(300):
        policy.touch(1, list(range(WIDTH, 2 * WIDTH)))
    policy.touch(2, [])
    assert np.isfinite(policy.values()).all()
    assert policy.values().shape == (LAYERS * WIDTH,)
    assert policy.bid(WIDTH, 1.0) >= policy.bid(WIDTH, 0.0)
