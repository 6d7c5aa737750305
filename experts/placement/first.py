"""Where experts are at first, and after ranks were lost."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import numpy as np

from experts.placement.cuts import MOST_RANKS
from experts.placement.eplb import eplb
from experts.placement.packing import pack
from experts.placement.placement import Floats, Placement, PlacementError, check_shape, linear

KINDS = ("packed", "eplb", "linear")
STEPS = 64
"""That a placement is made for where none has been seen."""


def slots_for(num_experts: int, ranks: int, replicas: float) -> int:
    """Slots of all ranks: a share of further copies, rounded up to equally many on each rank."""
    rows = -(-round(num_experts * (1.0 + replicas), 6) // ranks)
    return int(min(rows, num_experts)) * ranks


def first_placement(
    kind: str, num_experts: int, ranks: int, replicas: float, seen_SE: Floats | None = None
) -> Placement:
    """The placement of one layer before anything has run here; the same on every rank.

    Args:
        kind: one of `KINDS`.
        replicas: share of further copies.
        seen_SE: tokens of each expert in steps of a calibration; None where there is none, and no
            expert is expected to have more than any other.

    Raises:
        PlacementError: an unknown kind, or EPLB with slots that it cannot deal.
    """
    slots = slots_for(num_experts, ranks, replicas)
    if kind == "packed":
        if seen_SE is None:
            return _for_unseen(num_experts, slots, ranks)
        return pack(seen_SE, slots, ranks)
    if kind == "eplb":
        return eplb(np.ones(num_experts) if seen_SE is None else seen_SE.mean(0), slots, ranks)
    if kind == "linear":
        return linear(num_experts, slots, ranks)
    raise PlacementError(f"no placement is called {kind!r}; there are {', '.join(KINDS)}")


@cache
def _for_unseen(num_experts: int, slots: int, ranks: int) -> Placement:
    """For steps of which only a mean is known: what an expert gets is exponential, the least that
    can be assumed (its entropy is the largest). So copies are spread as to help whoever has more
    than others in a step; to even loads any copies would do. It is a second's work on few ranks and
    finds nothing better on many."""
    if ranks > MOST_RANKS:
        return pack(np.ones((1, num_experts)), slots, ranks)
    return pack(np.random.default_rng(0).exponential(size=(STEPS, num_experts)), slots, ranks)


def without_ranks(current: Placement, lost: Collection[int], slots: int) -> Placement:
    """The placement of those that are left, in their order: everybody keeps what it holds.

    Experts that nobody holds any more go to ranks with room, or else take the place of a copy.
    Room that is left is for copies, of those with fewest first.

    Args:
        slots: of the survivors together.

    Raises:
        PlacementError: nobody is left, or the slots cannot be dealt so.
    """
    left = [rank for rank in range(current.ranks) if rank not in lost]
    check_shape(current.num_experts, slots, len(left))
    held_ER = current.copies_ER[:, left] > 0
    rows = slots // len(left)
    if (held_ER.sum(0) > rows).any():
        raise PlacementError(f"{slots} slots on {len(left)} ranks are fewer than these hold now")
    for expert in np.flatnonzero(~held_ER.any(1)):
        rank = int(held_ER.sum(0).argmin())
        if held_ER[:, rank].sum() == rows:
            copies_E = held_ER.sum(1)
            copied = int(copies_E.argmax())
            rank = int(held_ER[copied].argmax())
            held_ER[copied, rank] = False
        held_ER[expert, rank] = True
    while (held_ER.sum(0) < rows).any():
        rank = int(held_ER.sum(0).argmin())
        copies_E = np.where(held_ER[:, rank], len(left), held_ER.sum(1))
        held_ER[copies_E.argmin(), rank] = True
    return Placement.from_held(held_ER)
