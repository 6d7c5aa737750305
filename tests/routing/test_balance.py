"""Choosing among copies: every token served once, by a holder, and as level as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.sharing_optimum import optimum
from routing.balance import choose_counts, choose_ranks, share_by_price, share_evenly

Ints = NDArray[np.int64]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Ints, Ints]:
    """Tokens of each expert in a step, and the copies of each on each rank."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    copies_ER = (rng.random((experts, ranks)) < draw(st.floats(0, 0.5))).astype(np.int64)
    copies_ER[np.arange(experts), rng.integers(ranks, size=experts)] = 1
    popularity = rng.permutation(experts) + 1.0
    tokens_E = rng.poisson(200 * popularity ** -draw(st.sampled_from((0.0, 0.5, 1.0, 2.0))))
    return tokens_E.astype(np.int64), copies_ER


@given(steps())
@settings(max_examples=150, deadline=None)
def test_shares_are_within_2_percent_of_the_linear_program(step: tuple[Ints, Ints]) -> None:
    tokens_E, copies_ER = step
    shares_ER = share_by_price(tokens_E[None].astype(np.float64), copies_ER)[0]
    assert (shares_ER >= 0).all()
    assert (shares_ER[copies_ER == 0] == 0).all()
    np.testing.assert_allclose(shares_ER.sum(1), tokens_E, rtol=1e-9, atol=1e-9)
    least = optimum(tokens_E.astype(np.float64), copies_ER)
    evenly = share_evenly(tokens_E[None].astype(np.float64), copies_ER)[0].sum(0).max()
    assert least - 1e-6 <= shares_ER.sum(0).max() <= min(least * 1.02, evenly) + 1e-6


@given(steps())
@settings(max_examples=100, deadline=None)
def test_whole_tokens_are_all_served_by_holders(step: tuple[Ints, Ints]) -> None:
    tokens_E, copies_ER = step
    counts_ER = choose_counts(tokens_E, copies_ER)
    np.testing.assert_array_equal(counts_ER.sum(1), tokens_E)
    assert (counts_ER >= 0).all()
    assert (counts_ER[copies_ER == 0] == 0).all()
    # A token is not divisible: each shared expert may add one beyond the optimum.
    shared = np.count_nonzero((copies_ER > 0).sum(1) > 1)
    least = optimum(tokens_E.astype(np.float64), copies_ER)
    assert counts_ER.sum(0).max() <= least * 1.02 + shared + 1e-6


@given(steps(), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_each_slot_gets_a_rank_in_these_counts(step: tuple[Ints, Ints], top_k: int) -> None:
    tokens_E, copies_ER = step
    ids = np.repeat(np.arange(len(tokens_E)), tokens_E)
    unused = -len(ids) % top_k
    ids = np.random.default_rng(0).permutation(np.concatenate([ids, np.full(unused, -1)]))
    counts_ER = choose_counts(tokens_E, copies_ER)
    ranks_TK = choose_ranks(ids.reshape(-1, top_k), counts_ER)
    ranks = ranks_TK.reshape(-1)
    assert (ranks[ids < 0] == -1).all()
    served_ER = np.zeros_like(counts_ER)
    np.add.at(served_ER, (ids[ids >= 0], ranks[ids >= 0]), 1)
    np.testing.assert_array_equal(served_ER, counts_ER)


def test_tokens_of_one_expert_go_to_ranks_in_their_order() -> None:
    counts_ER = np.array([[2, 0, 1], [0, 1, 0]])
    ids_TK = np.array([[0, 1], [0, -1], [0, -1]])
    np.testing.assert_array_equal(choose_ranks(ids_TK, counts_ER), [[0, 1], [0, -1], [2, -1]])


@pytest.mark.parametrize("ranks", [2, 5, 9])
def test_a_chain_of_copies_carries_load_from_end_to_end(ranks: int) -> None:
    """Expert r lives on ranks r and r + 1, and all load begins at one end."""
    copies_ER = np.eye(ranks, dtype=np.int64)[:-1] + np.eye(ranks, k=1, dtype=np.int64)[:-1]
    loads_E = np.arange(ranks - 1, 0, -1.0)
    loads_R = share_by_price(1000 * loads_E[None], copies_ER)[0].sum(0)
    assert loads_R.max() <= 1.02 * optimum(1000 * loads_E, copies_ER)


def test_an_idle_step_costs_nothing() -> None:
    assert (share_by_price(np.zeros((1, 3)), np.ones((3, 2), np.int64)) == 0).all()
    assert (choose_counts(np.zeros(3, np.int64), np.ones((3, 2), np.int64)) == 0).all()
