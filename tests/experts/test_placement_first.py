"""First placements, and those of the ranks that are left: complete, and nothing moved in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.placement import (
    Placement,
    PlacementError,
    eplb,
    first_placement,
    linear,
    pack,
    slots_for,
    without_ranks,
)
from experts.placement.evenness import heaviest
from experts.placement.packing import KINDS


@given(st.integers(1, 300), st.integers(1, 64), st.floats(0, 1))
def test_slots_can_always_be_dealt(experts: int, ranks: int, replicas: float) -> None:
    slots = slots_for(experts, ranks, replicas)
    assert slots % ranks == 0
    assert experts <= slots <= experts * ranks
    assert slots <= experts * (1 + replicas) + ranks


def test_one_rank_has_no_copies() -> None:
    assert slots_for(32, 1, 0.25) == 32
    assert [slots_for(32, ranks, 0.25) for ranks in (2, 3, 4)] == [40, 42, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_places_without_having_seen_anything(kind: str) -> None:
    placement = first_placement(kind, 32, 4, 0.25)
    assert placement.shape == (32, 40, 4)
    assert placement == first_placement(kind, 32, 4, 0.25)


@pytest.mark.parametrize(("experts", "ranks"), [(16, 4), (64, 8)])
def test_copies_help_whoever_has_more_by_chance(experts: int, ranks: int) -> None:
    """Steps of 4 tokens an expert, all of which are equally likely: the heaviest rank over the
    mean."""
    loads_SE = np.random.default_rng(1).poisson(4.0, size=(64, experts)).astype(np.float64)
    slots, level = slots_for(experts, ranks, 0.25), loads_SE.sum(1).mean() / ranks
    ours = heaviest(loads_SE, first_placement("packed", experts, ranks, 0.25).copies_ER) / level
    even = heaviest(loads_SE, pack(np.ones((1, experts)), slots, ranks).copies_ER) / level
    assert ours - 1 < 0.75 * (even - 1)


def test_what_has_been_seen_decides_who_is_copied() -> None:
    seen_SE = np.ones((4, 8))
    seen_SE[:, 5] = 30.0
    for kind in ("packed", "eplb"):
        assert first_placement(kind, 8, 2, 0.25, seen_SE).copies_ER[5].sum() >= 2
    assert first_placement("packed", 8, 2, 0.25, seen_SE) == pack(seen_SE, 10, 2)
    assert first_placement("eplb", 8, 2, 0.25, seen_SE) == eplb(seen_SE.mean(0), 10, 2)
    assert first_placement("linear", 8, 2, 0.25, seen_SE) == linear(8, 10, 2)


def test_an_unknown_kind_is_named_with_those_there_are() -> None:
    with pytest.raises(PlacementError, match="'best'; there are packed, eplb, linear"):
        first_placement("best", 8, 2, 0.25)


@st.composite
def losses(draw: st.DrawFn) -> tuple[Placement, set[int], float]:
    ranks = draw(st.integers(2, 6))
    experts = draw(st.integers(ranks, 40))
    replicas = draw(st.floats(0, 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    seen_SE = rng.poisson(20.0, size=(3, experts)).astype(np.float64)
    lost = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    return first_placement("packed", experts, ranks, replicas, seen_SE), lost, replicas


@given(losses())
def test_survivors_keep_what_they_have_and_hold_everything(
    case: tuple[Placement, set[int], float],
) -> None:
    before, lost, replicas = case
    left = [rank for rank in range(before.ranks) if rank not in lost]
    slots = slots_for(before.num_experts, len(left), replicas)
    after = without_ranks(before, lost, slots)  # complete, or Placement would refuse it
    assert after.shape == (before.num_experts, slots, len(left))
    assert after.copies_ER.max() == 1
    kept_ER = before.copies_ER[:, left]
    given_up = int((kept_ER > after.copies_ER).sum())
    homeless = int((kept_ER.sum(1) == 0).sum())
    room = slots - int(kept_ER.sum())
    assert given_up == max(homeless - room, 0)
    assert lost or after.copies_ER.tolist() == before.copies_ER.tolist()


def test_survivors_need_room() -> None:
    with pytest.raises(PlacementError, match="6 slots for 8 experts on 1 ranks"):
        without_ranks(linear(8, 12, 2), {0}, 6)
    with pytest.raises(PlacementError, match="8 slots on 2 ranks are fewer than these hold now"):
        without_ranks(linear(8, 15, 3), {0}, 8)
