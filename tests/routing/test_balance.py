"""Choosing among copies: every token served once, by a holder, and as level as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.balance import choose_counts, deal
from tests.oracles.sharing_optimum import optimum
from tests.routing.balance_cases import Ints, steps


@given(steps())
@settings(max_examples=100)
def test_whole_tokens_are_all_served_by_holders(step: tuple[Ints, Ints]) -> None:
    tokens_E, copies_ER = step
    counts_ER = choose_counts(tokens_E, copies_ER)
    np.testing.assert_array_equal(counts_ER.sum(1), tokens_E)
    assert (counts_ER >= 0).all()
    assert (counts_ER[copies_ER == 0] == 0).all()
    # The least that whole tokens can do: the optimum of divisible ones, rounded up (flows of
    # integers are integers).
    loads_E, heaviest = tokens_E.astype(np.float64), counts_ER.sum(0).max()
    assert heaviest == np.ceil(optimum(loads_E, copies_ER) - 1e-6)
    assert heaviest == round(optimum(loads_E, copies_ER, whole=True))


@given(steps())
@settings(max_examples=100)
def test_two_ranks_split_at_most_one_expert_between_them(step: tuple[Ints, Ints]) -> None:
    tokens_E, copies_ER = step
    taken_ER = (choose_counts(tokens_E, copies_ER) > 0).astype(np.int64)
    both_RR = taken_ER.T @ taken_ER
    assert np.triu(both_RR, 1).max(initial=0) <= 1


def test_two_experts_are_traded_for_one_with_as_many_tokens() -> None:
    tokens_E = np.array([4, 2, 2, 1, 1, 1, 1])
    counts_ER = choose_counts(tokens_E, np.ones((7, 2), np.int64))
    assert counts_ER.sum(0).tolist() == [6, 6]
    assert sorted((counts_ER > 0).sum(0)) == [3, 4]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**32))
def test_ranks_take_their_own_tokens_first(counts: list[int], seed: int) -> None:
    ranks = np.random.default_rng(seed).permutation(8)[: len(counts)].tolist()
    part = dict(zip(ranks, counts, strict=True))
    source_N = np.sort(np.random.default_rng(seed).integers(8, size=sum(counts)))
    chosen = deal(part, source_N)
    for rank, count in part.items():
        assert np.count_nonzero(chosen == rank) == count
        own = np.count_nonzero((chosen == rank) & (source_N == rank))
        assert own == min(count, np.count_nonzero(source_N == rank))


def test_other_tokens_of_an_expert_go_to_ranks_in_their_order() -> None:
    assert deal({0: 2, 2: 1}, np.array([1, 2, 3])).tolist() == [0, 2, 0]


@pytest.mark.parametrize("ranks", [2, 5, 9])
def test_a_chain_of_copies_carries_load_from_end_to_end(ranks: int) -> None:
    """Expert r lives on ranks r and r + 1, and all load begins at one end."""
    copies_ER = np.eye(ranks, dtype=np.int64)[:-1] + np.eye(ranks, k=1, dtype=np.int64)[:-1]
    tokens_E = 1000 * np.arange(ranks - 1, 0, -1)
    heaviest = choose_counts(tokens_E, copies_ER).sum(0).max()
    assert heaviest == np.ceil(optimum(tokens_E.astype(np.float64), copies_ER) - 1e-6)


def test_an_idle_step_costs_nothing() -> None:
    assert (choose_counts(np.zeros(3, np.int64), np.ones((3, 2), np.int64)) == 0).all()
