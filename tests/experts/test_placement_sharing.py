"""Shares of copies over many steps: never worse than even ones, and close to the optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from experts.placement.evenness import share_by_price, share_evenly
from experts.placement.placement import Ints
from tests.oracles.sharing_optimum import optimum
from tests.routing.balance_cases import steps


@given(steps())
@settings(max_examples=150)
def test_shares_are_within_2_percent_of_the_linear_program(step: tuple[Ints, Ints]) -> None:
    loads_E, copies_ER = step[0].astype(np.float64), step[1]
    shares_ER = share_by_price(loads_E[None], copies_ER)[0]
    assert (shares_ER >= 0).all()
    assert (shares_ER[copies_ER == 0] == 0).all()
    np.testing.assert_allclose(shares_ER.sum(1), loads_E, rtol=1e-9, atol=1e-9)
    least = optimum(loads_E, copies_ER)
    evenly = share_evenly(loads_E[None], copies_ER)[0].sum(0).max()
    assert least - 1e-6 <= shares_ER.sum(0).max() <= min(least * 1.02, evenly) + 1e-6


@pytest.mark.parametrize("ranks", [2, 5, 9])
def test_a_chain_of_copies_carries_load_from_end_to_end(ranks: int) -> None:
    """Expert r lives on ranks r and r + 1, and all load begins at one end."""
    copies_ER = np.eye(ranks, dtype=np.int64)[:-1] + np.eye(ranks, k=1, dtype=np.int64)[:-1]
    loads_E = np.arange(ranks - 1, 0, -1.0)
    loads_R = share_by_price(1000 * loads_E[None], copies_ER)[0].sum(0)
    assert loads_R.max() <= 1.02 * optimum(1000 * loads_E, copies_ER)


def test_an_idle_step_costs_nothing() -> None:
    assert (share_by_price(np.zeros((1, 3)), np.ones((3, 2), np.int64)) == 0).all()
