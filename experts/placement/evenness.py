"""Judges how even a placement is: the heaviest rank's load, if copies share an expert's tokens
well.

Copies share as in kernels/cpu/assign.cpp, but here a load may be cut anywhere. On any number of
ranks, `share_by_price` levels the loads: a rank's price is its load, and half the sum of squared
loads has
just these dual prices. Its minimum also has the least heaviest load (it is the least majorised
solution).

On few ranks, `heaviest_by_cuts` needs no levelling. Ranks that alone hold some experts serve all
tokens of these, so the heaviest rank of a set is at least as heavy as their load over the number of
ranks. The largest of these bounds over all ``2^R - 1`` sets is reached (maximum flow, minimum cut).
An exchange of two slots changes two experts' parts of each set.

Legend: S steps, E experts, R ranks, N slots of a rank, M sets of ranks with the empty one, C
without it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from experts.placement.placement import Floats, Ints

SWEEPS, MAX_SWEEPS = 20, 200
"""Turns of every expert while loads are levelled: where the search compares, and at most."""
LEVEL = 1e-3
"""Loads are level when a sweep moves no more than this share of the mean load on any rank."""
MOST_RANKS = 8
"""Up to so many ranks, all sets of ranks are looked at."""


def heaviest(costs_SE: Floats, copies_ER: Ints) -> float:
    """Mean over the steps of the heaviest rank's load, copies sharing as evenly as they can."""
    return float(heaviest_S(costs_SE, copies_ER).mean())


def heaviest_S(costs_SE: Floats, copies_ER: Ints) -> Floats:
    if copies_ER.shape[1] <= MOST_RANKS:
        return heaviest_by_cuts(costs_SE, copies_ER)
    return np.asarray(share_by_price(costs_SE, copies_ER, SWEEPS).sum(1).max(1))


def fee(copies_ER: Ints, home_ER: Ints, price_E: Floats) -> float:
    """Price of the copies that ranks do not hold yet (`home_ER`)."""
    return float(price_E @ ((copies_ER > 0) & (home_ER == 0)).sum(1))


def heaviest_by_cuts(costs_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S,)``: the heaviest rank's load in each step, shared as evenly as copies allow."""
    return np.asarray((costs_SE @ parts_of(copies_ER.shape[1])[sets_of(copies_ER)]).max(1))


def sets_of(copies_ER: Ints) -> Ints:
    """``(E,)``: the ranks of each expert as a bit mask."""
    return np.asarray((copies_ER > 0) @ (1 << np.arange(copies_ER.shape[1])), np.int64)


@cache
def parts_of(ranks: int) -> Floats:
    """``(M, C)``: part of an expert on ranks M that each rank of set C bears on average."""
    sets_M = np.arange(1 << ranks)
    size_M = (sets_M[:, None] >> np.arange(ranks) & 1).sum(1)
    within_MC = sets_M[:, None] & ~sets_M[None, 1:] == 0
    return np.asarray(within_MC / size_M[1:])


def share_evenly(loads_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S, E, R)``: each copy of an expert gets the same part, as by taking turns."""
    return np.asarray(loads_SE[:, :, None] * (copies_ER / copies_ER.sum(1, keepdims=True)))


def share_by_price(loads_SE: Floats, copies_ER: Ints, max_sweeps: int = MAX_SWEEPS) -> Floats:
    """``(S, E, R)`` parts of each expert's load in each step that make the heaviest rank lightest.

    Every expert in turn moves its load to the ranks with the lowest price until prices are level.

    Args:
        loads_SE: tokens, or what they cost.
        copies_ER: copies of each expert on each rank; at least one of each expert.
        max_sweeps: turns of every expert; fewer are less exact.
    """
    shares_SER = share_evenly(loads_SE, (copies_ER > 0).astype(np.int64))
    movable = np.flatnonzero((copies_ER > 0).sum(1) > 1)
    movable = movable[np.argsort(-loads_SE[:, movable].sum(0), kind="stable")]
    prices_SR = shares_SER.sum(1)
    enough_S = LEVEL * loads_SE.sum(1) / copies_ER.shape[1]
    for _ in range(max_sweeps if len(movable) else 0):
        before_SR = prices_SR.copy()
        for expert in movable:
            ranks = np.flatnonzero(copies_ER[expert])
            others = prices_SR[:, ranks] - shares_SER[:, expert, ranks]
            parts = _fill(others, loads_SE[:, expert])
            shares_SER[:, expert, ranks] = parts
            prices_SR[:, ranks] = others + parts
        if (np.abs(prices_SR - before_SR).max(1) <= enough_S).all():
            break
    return shares_SER


def _fill(prices_SN: Floats, amounts_S: Floats) -> Floats:
    """Distribute amounts over N ranks with these loads by water-filling: ``(S, N)``."""
    ordered = np.sort(prices_SN, axis=1)
    levels = (amounts_S[:, None] + ordered.cumsum(1)) / np.arange(1, ordered.shape[1] + 1)
    wet = (levels > ordered).sum(1).clip(1) - 1
    level_S = np.take_along_axis(levels, wet[:, None], 1)
    return np.asarray((level_S - prices_SN).clip(0.0))
