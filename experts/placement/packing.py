"""Placements by our own packing: `first_placement`, `repack` while serving, `without_ranks`.

EPLB places by the mean load and gives each copy of an expert an equal part. Here loads differ from
step to step, and copies share an expert's tokens as kernels/cpu/assign.cpp does. A placement is
judged by the mean over observed steps of the heaviest rank's load (`evenness`), and improved
from a greedy
start in which no rank has two copies of one expert (`search`). `repack` starts from the present
placement and accepts a change only if it also pays for the moves, on steps that it was not made
from: any change can be fitted to chance.

Legend: S steps, E experts, R ranks, P slots.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import NamedTuple

import numpy as np

from experts.placement.evenness import MOST_RANKS, fee, heaviest, heaviest_S
from experts.placement.placement import (
    Floats,
    Ints,
    Placement,
    PlacementError,
    check_shape,
    eplb,
    fewest_moves,
    linear,
    replicate,
)
from experts.placement.search import improve

KINDS = ("packed", "eplb", "linear")
STEPS = 64
"""Random steps that a placement is made for if none has been observed."""

MAX_STEPS = 64
"""Steps that a placement is judged by, evenly spaced over those observed."""
SURE = 1.0
"""Standard errors by which a certain gain is above 0. A change need not be certain, else shifting
loads are followed too late; but while no gain is certain, `Rebalancer` asks rarely."""


def slots_for(num_experts: int, ranks: int, replicas: float) -> int:
    """Slots of all ranks: a share of further copies, rounded up to equally many on each rank."""
    rows = -(-round(num_experts * (1.0 + replicas), 6) // ranks)
    return int(min(rows, num_experts)) * ranks


def first_placement(
    kind: str, num_experts: int, ranks: int, replicas: float, seen_SE: Floats | None = None
) -> Placement:
    """The placement of one layer before the first step; the same on every rank.

    Args:
        kind: one of `KINDS`.
        replicas: share of further copies.
        seen_SE: tokens of each expert in steps of a calibration; None: there is none, and all
            experts are expected to get the same.

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
    """A placement for steps of which only the mean is known.

    Loads are taken to be exponential, which has the largest entropy, so copies are spread to help
    whichever rank has more than others in a step. This takes a second on few ranks. On many it
    finds nothing better than for equal loads, so these are taken.
    """
    if ranks > MOST_RANKS:
        return pack(np.ones((1, num_experts)), slots, ranks)
    return pack(np.random.default_rng(0).exponential(size=(STEPS, num_experts)), slots, ranks)


class Repacked(NamedTuple):
    """The result of `repack`.

    Attributes:
        placement: the new one, or the current one if no change pays.
        sure: it is a new one and its gain is beyond chance (`SURE`).
    """

    placement: Placement
    sure: bool


def pack(costs_SE: Floats, slots: int, ranks: int) -> Placement:
    """Place the experts of one layer for steps like these, from nothing.

    Args:
        costs_SE: what each expert costs in each observed step; see `step_costs`.
        slots: of all ranks.

    Raises:
        PlacementError: the slots cannot be dealt so.
    """
    check_shape(costs_SE.shape[1], slots, ranks)
    costs_SE = _judged(costs_SE)
    mean_E = costs_SE.mean(0)
    starts = [_greedy(mean_E, slots, ranks), eplb(mean_E, slots, ranks).copies_ER]
    free_E = np.zeros_like(mean_E)
    found = [improve(start, costs_SE, free_E) for start in starts if start.max() == 1]
    return Placement.from_held(min(found, key=lambda one: heaviest(costs_SE, one)) > 0)


def repack(costs_SE: Floats, current: Placement, price_E: Floats) -> Repacked:
    """Change a placement where that pays for steps like these.

    Args:
        costs_SE: expected cost of each expert in some coming steps; fewer than four prove nothing.
        current: the placement; kept if a rank holds two copies of one expert.
        price_E: cost of moving an expert to a rank that lacks it, over the steps in which that must
            pay: a load a step.
    """
    home_ER, costs_SE = current.copies_ER, _judged(costs_SE)
    kept = Repacked(current, sure=False)
    if home_ER.max() > 1 or len(costs_SE) < 4:
        return kept
    by_half_ER, other_SE = improve(home_ER, costs_SE[::2], price_E), costs_SE[1::2]
    saved_S = heaviest_S(other_SE, home_ER) - heaviest_S(other_SE, by_half_ER)
    gain = float(saved_S.mean()) - fee(by_half_ER, home_ER, price_E)
    if gain <= 0:
        return kept
    copies_ER = improve(home_ER, costs_SE, price_E)
    new = fewest_moves(current, Placement.from_held(copies_ER > 0), price_E)
    doubt = SURE * float(saved_S.std(ddof=1)) / len(saved_S) ** 0.5
    return Repacked(new, new != current and gain > doubt)


def without_ranks(current: Placement, lost: Collection[int], slots: int) -> Placement:
    """The placement of the ranks that are left, in their order; each keeps the experts it holds.

    Experts that no rank holds any more go to ranks with free slots, or else replace copies. The
    remaining slots get copies of the experts with fewest.

    Args:
        lost: ranks that are gone.
        slots: of the remaining ranks together.

    Raises:
        PlacementError: no rank is left, or the slots cannot be dealt so.
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


def _judged(costs_SE: Floats) -> Floats:
    steps = np.unique(np.linspace(0, len(costs_SE) - 1, MAX_STEPS).astype(np.int64))
    return costs_SE[steps]


def _greedy(loads_E: Floats, slots: int, ranks: int) -> Ints:
    """``(E, R)`` copies: the heaviest copy first, to the lightest rank with room and without it."""
    expert_P, count_E = replicate(loads_E, slots, ranks)
    part_E = loads_E / count_E
    copies_ER = np.zeros((len(loads_E), ranks), np.int64)
    load_R = np.zeros(ranks)
    for expert in expert_P[np.argsort(-part_E[expert_P], kind="stable")]:
        open_R = copies_ER.sum(0) < slots // ranks
        free_R = open_R & (copies_ER[expert] == 0)
        moved = expert
        if free_R.any():
            rank = int(np.where(free_R, load_R, np.inf).argmin())
        else:  # every open rank has it: a full one hands over an expert that the open one lacks
            rank = int(open_R.argmax())
            full = int(np.flatnonzero(copies_ER[expert] == 0)[0])
            moved = int(np.flatnonzero((copies_ER[:, full] > 0) & (copies_ER[:, rank] == 0))[0])
            copies_ER[moved, full] -= 1
            copies_ER[expert, full] += 1
            load_R[full] += part_E[expert] - part_E[moved]
        copies_ER[moved, rank] += 1
        load_R[rank] += part_E[moved]
    return copies_ER
