"""Our packing: made for loads that differ from step to step, and for copies that share by price.

EPLB places by the mean load and gives each copy an equal part. Here a placement is judged as it
will be used: the mean over observed steps of the heaviest rank's load after `share_by_price`. A
greedy start (no rank gets two copies of one expert) is improved by exchanges between two ranks and
by giving a copy's slot to another expert: on few ranks by `cuts`, on more as long as that lowers
the mean. `repack` starts from where experts are and takes a change only if it also pays for what it
moves, on steps that it was not made from: any change can be fitted to chance.

Legend: S steps, E experts, R ranks, P slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experts.placement.cuts import MOST_RANKS, anneal, heaviest_by_cuts
from experts.placement.eplb import eplb, replicate
from experts.placement.moves import fewest_moves
from experts.placement.placement import Floats, Ints, Placement, check_shape
from experts.placement.sharing import share_by_price

Change = tuple[tuple[int, int, int], ...]
"""Experts, ranks, and copies more or less there."""

MAX_STEPS = 64
"""Steps that a placement is judged by; evenly spaced ones of those observed."""
SWEEPS = 20
MAX_ROUNDS = 200
TRIALS = 24
"""Most promising changes of each kind that are judged exactly before the search ends."""
WORTH = 2e-4
"""Least share by which a change must lower the mean of the heaviest load."""
SURE = 1.0
"""Standard errors by which a gain is above nothing that is no luck. A change need not be that sure,
else favourites that change are followed too late; but who only sees luck need not look often."""


class Repacked(NamedTuple):
    """The placement to go over to, or the current one where no change pays.

    Attributes:
        sure: it is another one, and pays for sure; by luck a change may seem to.
    """

    placement: Placement
    sure: bool


def pack(costs_SE: Floats, slots: int, ranks: int) -> Placement:
    """Place the experts of one layer for steps like these, wherever they are now.

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
    found = [_improve(start, costs_SE, free_E) for start in starts if start.max() == 1]
    return Placement.from_held(min(found, key=lambda one: heaviest(costs_SE, one)) > 0)


def repack(costs_SE: Floats, current: Placement, price_E: Floats) -> Repacked:
    """What to do with a placement for steps like these.

    Args:
        costs_SE: what each expert is expected to cost in each of some coming steps; of one alone
            nothing can be proven.
        current: no rank may hold two copies of one expert, else it is kept.
        price_E: what it costs to bring an expert to a rank that lacks it, spread over the steps in
            which that must pay: a load a step.
    """
    home_ER, costs_SE = current.copies_ER, _judged(costs_SE)
    kept = Repacked(current, sure=False)
    if home_ER.max() > 1 or len(costs_SE) < 4:
        return kept
    by_half_ER, other_SE = _improve(home_ER, costs_SE[::2], price_E), costs_SE[1::2]
    saved_S = _heaviest_S(other_SE, home_ER) - _heaviest_S(other_SE, by_half_ER)
    gain = float(saved_S.mean()) - fee(by_half_ER, home_ER, price_E)
    if gain <= 0:
        return kept
    copies_ER = _improve(home_ER, costs_SE, price_E)
    new = fewest_moves(current, Placement.from_held(copies_ER > 0), price_E)
    doubt = SURE * float(saved_S.std(ddof=1)) / len(saved_S) ** 0.5
    return Repacked(new, new != current and gain > doubt)


def fee(copies_ER: Ints, home_ER: Ints, price_E: Floats) -> float:
    """Price of the copies that ranks do not hold yet."""
    return float(price_E @ ((copies_ER > 0) & (home_ER == 0)).sum(1))


def heaviest(costs_SE: Floats, copies_ER: Ints) -> float:
    """Mean over the steps of the heaviest rank's load when copies share by price."""
    return float(_heaviest_S(costs_SE, copies_ER).mean())


def _heaviest_S(costs_SE: Floats, copies_ER: Ints) -> Floats:
    if copies_ER.shape[1] <= MOST_RANKS:
        return heaviest_by_cuts(costs_SE, copies_ER)
    return np.asarray(share_by_price(costs_SE, copies_ER, SWEEPS).sum(1).max(1))


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
        else:  # every rank with room has it: a full one gives up an expert that the open one lacks
            rank = int(open_R.argmax())
            full = int(np.flatnonzero(copies_ER[expert] == 0)[0])
            moved = int(np.flatnonzero((copies_ER[:, full] > 0) & (copies_ER[:, rank] == 0))[0])
            copies_ER[moved, full] -= 1
            copies_ER[expert, full] += 1
            load_R[full] += part_E[expert] - part_E[moved]
        copies_ER[moved, rank] += 1
        load_R[rank] += part_E[moved]
    return copies_ER


def _improve(home_ER: Ints, costs_SE: Floats, price_E: Floats) -> Ints:
    """Make changes that are worth it, moves paid for, until none is found or loads are level."""
    value, level = heaviest(costs_SE, home_ER), costs_SE.sum(1).mean() / home_ER.shape[1]
    if value <= level * (1 + WORTH):
        return home_ER
    if home_ER.shape[1] <= MOST_RANKS:
        found_ER = anneal(home_ER, costs_SE, price_E)
        lower = heaviest(costs_SE, found_ER) + fee(found_ER, home_ER, price_E)
        return found_ER if lower <= value * (1 - WORTH) else home_ER
    copies_ER = home_ER
    for _ in range(MAX_ROUNDS):
        for changed_ER in _changes(copies_ER, costs_SE):
            lower = heaviest(costs_SE, changed_ER) + fee(changed_ER, home_ER, price_E)
            if lower <= value * (1 - WORTH):
                value, copies_ER = lower, changed_ER
                break
        else:
            break
    return copies_ER


def _changes(copies_ER: Ints, costs_SE: Floats) -> Iterator[Ints]:
    """What promises the most level loads while other experts' shares stay as they are."""
    shares_SER = share_by_price(costs_SE, copies_ER, SWEEPS)
    loads_SR = shares_SER.sum(1)
    rank = int((loads_SR >= loads_SR.max(1, keepdims=True)).mean(0).argmax())
    for candidates in (_exchanges, _replacements):
        found = list(candidates(copies_ER, shares_SER, loads_SR, rank))
        for _, change in sorted(found, key=lambda one: one[0])[:TRIALS]:
            changed_ER = copies_ER.copy()
            for expert, at, by in change:
                changed_ER[expert, at] += by
            yield changed_ER


def _exchanges(
    copies_ER: Ints, shares_SER: Floats, loads_SR: Floats, rank: int
) -> Iterator[tuple[float, Change]]:
    """An expert of the heaviest rank for one of another rank; how uneven loads grow by it."""
    for expert in np.flatnonzero(copies_ER[:, rank]).tolist():
        for other in np.flatnonzero(copies_ER[expert] == 0).tolist():
            back = np.flatnonzero((copies_ER[:, other] > 0) & (copies_ER[:, rank] == 0))
            moved_SN = shares_SER[:, expert, rank, None] - shares_SER[:, back, other]
            gap_S = loads_SR[:, rank] - loads_SR[:, other]
            growth_N = (moved_SN * (moved_SN - gap_S[:, None])).mean(0)
            for partner, growth in zip(back.tolist(), growth_N, strict=True):
                there = ((expert, rank, -1), (expert, other, 1))
                yield float(growth), (*there, (partner, other, -1), (partner, rank, 1))


def _replacements(
    copies_ER: Ints, shares_SER: Floats, loads_SR: Floats, rank: int
) -> Iterator[tuple[float, Change]]:
    """A copy elsewhere for one of an expert of the heaviest rank."""
    for spare, other in np.argwhere(copies_ER * (copies_ER.sum(1, keepdims=True) > 1)).tolist():
        after_SR = loads_SR.copy()
        rest = np.flatnonzero((copies_ER[spare] > 0) & (np.arange(copies_ER.shape[1]) != other))
        after_SR[:, other] -= shares_SER[:, spare, other]
        after_SR[:, rest] += shares_SER[:, spare, other, None] / len(rest)
        grown = (after_SR**2).sum(1) - (loads_SR**2).sum(1)
        helped = np.flatnonzero((copies_ER[:, rank] > 0) & (copies_ER[:, other] == 0))
        gap_S = (after_SR[:, rank] - after_SR[:, other]).clip(0.0)
        moved_SN = np.minimum(shares_SER[:, helped, rank], gap_S[:, None] / 2)
        growth_N = (grown[:, None] / 2 + moved_SN * (moved_SN - gap_S[:, None])).mean(0)
        for expert, growth in zip(helped.tolist(), growth_N, strict=True):
            if expert != spare:
                yield float(growth), ((spare, other, -1), (expert, other, 1))
