"""Placements: EPLB's golden numbers, and what must hold for ours on any loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.placement import (
    Placement,
    PlacementError,
    eplb,
    fewest_moves,
    linear,
    pack,
    repack,
    step_costs,
)
from experts.placement.evenness import share_by_price, share_evenly
from experts.placement.placement import Floats
from tests.oracles.sharing_optimum import imbalance

GOLDEN = (
    # Loads, placement by groups and nodes, imbalance of it and of the global one: EPLB's README.
    (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (1.208, 1.073),
    ),
    (
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
        (1.242, 1.190),
    ),
)


def evenly(loads_SE: Floats, placement: Placement) -> float:
    return float(imbalance(share_evenly(loads_SE, placement.copies_ER).sum(1)).mean())


def by_price(loads_SE: Floats, placement: Placement) -> float:
    return float(imbalance(share_by_price(loads_SE, placement.copies_ER).sum(1)).mean())


@pytest.mark.parametrize(("loads", "experts_P", "expected"), GOLDEN)
def test_eplb_gives_the_numbers_of_its_readme(
    loads: list[int], experts_P: tuple[int, ...], expected: tuple[float, float]
) -> None:
    loads_E = np.array(loads, np.float64)
    hierarchical = eplb(loads_E, 16, 8, groups=4, nodes=2)
    assert hierarchical.experts_P == experts_P
    together = eplb(loads_E, 16, 8)
    found = [round(evenly(loads_E[None], p), 3) for p in (hierarchical, together)]
    assert found == list(expected)
    assert eplb(loads_E, 16, 8, groups=3, nodes=2) == together


@st.composite
def observed(draw: st.DrawFn) -> tuple[Floats, int, int]:
    """``(S, E)`` loads, slots and ranks that suit each other."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(ranks, 16))
    rows = draw(st.integers(-(-experts // ranks), experts))
    popularity = rng.permutation(experts) + 1.0
    loads_E = 500 * popularity ** -draw(st.sampled_from((0.0, 1.0, 3.0)))
    return rng.poisson(loads_E, size=(6, experts)).astype(np.float64), rows * ranks, ranks


@given(observed())
def test_ours_is_complete_and_never_doubles_an_expert_on_a_rank(
    case: tuple[Floats, int, int],
) -> None:
    loads_SE, slots, ranks = case
    placement = pack(loads_SE, slots, ranks)
    assert placement.shape == (loads_SE.shape[1], slots, ranks)
    assert placement.copies_ER.max() == 1
    assert (placement.copies_ER.sum(0) == slots // ranks).all()
    assert placement == pack(loads_SE, slots, ranks)  # no chance in it
    theirs = eplb(loads_SE.mean(0), slots, ranks)
    if theirs.copies_ER.max() == 1:
        assert by_price(loads_SE, placement) <= by_price(loads_SE, theirs) * 1.02
    assert by_price(loads_SE, placement) <= evenly(loads_SE, theirs) * 1.02


@given(observed(), st.randoms(use_true_random=False))
def test_renamed_ranks_move_nothing(case: tuple[Floats, int, int], chance: object) -> None:
    loads_SE, slots, ranks = case
    current = pack(loads_SE, slots, ranks)
    rows = np.array(current.experts_P).reshape(ranks, -1)
    order = list(range(ranks))
    chance.shuffle(order)  # type: ignore[attr-defined]
    renamed = Placement(tuple(rows[order][:, ::-1].reshape(-1).tolist()), *current.shape[::2])
    assert fewest_moves(current, renamed, np.ones(current.num_experts)) == current


def test_level_loads_leave_everything_where_it_is() -> None:
    current = linear(8, 8, 4)
    assert repack(np.full((4, 8), 5.0), current, np.zeros(8)) == (current, False)


def test_reading_is_part_of_the_load() -> None:
    tokens_SE = np.array([[4.0, 4.0, 4.0, 0.0, 0.5]])
    costs_SE = step_costs(tokens_SE, np.array([0.0, 2.5, 2.5, 9.0, 2.0]))
    assert costs_SE.tolist() == [[4.0, 6.5, 6.5, 0.0, 1.5]]
    # The two that must be read are kept apart although the first has as many tokens.
    held = pack(costs_SE, 6, 2).copies_ER
    assert (held[1] != held[2]).any()


@pytest.mark.parametrize(
    ("slots", "ranks", "message"),
    [(9, 2, "9 slots for 8 experts on 2 ranks"), (6, 2, "at least one an expert"), (24, 2, "most")],
)
def test_shapes_that_cannot_be_dealt_are_refused(slots: int, ranks: int, message: str) -> None:
    for place in (
        lambda: linear(8, slots, ranks),
        lambda: eplb(np.ones(8), slots, ranks),
        lambda: pack(np.ones((1, 8)), slots, ranks),
    ):
        with pytest.raises(PlacementError, match=message):
            place()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(PlacementError, match="every expert from 0 to 2 must have a slot"):
        Placement((0, 1, 1, 0), 3, 2)
    with pytest.raises(PlacementError, match="8 experts in 3 groups"):
        eplb(np.ones(8), 8, 2, groups=3)


def test_an_empty_step_is_level() -> None:
    assert imbalance(np.zeros((1, 4))).tolist() == [1.0]
    assert imbalance(np.array([[1.0, 3.0]])).tolist() == [1.5]
