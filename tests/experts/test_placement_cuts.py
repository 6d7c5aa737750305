"""Placing on few ranks: what sets of ranks must bear is what a linear program says, and walks end
at placements as good as any where all can be tried."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings

from experts.placement.evenness import heaviest_by_cuts
from experts.placement.placement import Floats, Ints
from experts.placement.search import anneal
from tests.oracles.sharing_optimum import optimum
from tests.routing.balance_cases import steps


@given(steps())
@settings(max_examples=100)
def test_sets_of_ranks_say_what_the_linear_program_says(step: tuple[Ints, Ints]) -> None:
    loads_E, copies_ER = step[0].astype(np.float64), step[1]
    found = heaviest_by_cuts(loads_E[None], copies_ER)[0]
    assert found == pytest.approx(optimum(loads_E, copies_ER), abs=1e-6)


def start_of(experts: int, ranks: int, rows: int) -> Ints:
    """Experts in turn."""
    copies_ER = np.zeros((experts, ranks), np.int64)
    slots = np.arange(ranks * rows)
    copies_ER[slots % experts, slots // rows] = 1
    return copies_ER


def test_a_walk_comes_near_to_the_best_of_all_placements() -> None:
    over = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs_SE = rng.poisson(40 / (rng.permutation(5) + 1.0), size=(4, 5)).astype(np.float64)
        least = min(heaviest_by_cuts(costs_SE, one).mean() for one in all_placements(5, 3, 2))
        found_ER = anneal(start_of(5, 3, 2), costs_SE, np.zeros(5))
        assert (found_ER.sum(0) == 2).all()
        assert (found_ER.sum(1) >= 1).all()
        assert found_ER.max() == 1
        over.append(heaviest_by_cuts(costs_SE, found_ER).mean() / least)
    assert np.mean(over) <= 1.01
    assert max(over) <= 1.06  # now and then a walk ends in a valley beside


def all_placements(experts: int, ranks: int, rows: int) -> list[Ints]:
    found = []
    for held in product(combinations(range(experts), rows), repeat=ranks):
        copies_ER = np.zeros((experts, ranks), np.int64)
        for rank, own in enumerate(held):
            copies_ER[list(own), rank] = 1
        if copies_ER.any(1).all():
            found.append(copies_ER)
    return found


def test_moves_are_paid_for() -> None:
    """Two ranks with 6 and 2 tokens: levelling saves 2, so for a price of 1 a copy it is even."""
    costs_SE: Floats = np.array([[4.0, 2.0, 1.0, 1.0]])
    home_ER = start_of(4, 2, 2)
    for price, moved in ((0.4, True), (1.1, False)):
        found_ER = anneal(home_ER, costs_SE, np.full(4, price))
        assert (found_ER != home_ER).any() == moved
