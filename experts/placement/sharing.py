"""How copies of experts share their loads over many steps: by this measure placements are judged.

A rank's price is its load: minimising half the sum of squared loads has just these dual prices, and
its solution has the least heaviest load too (it is the least majorised one). Every expert in turn
moves its tokens to where they are cheapest until prices are level.
`routing.balance` does the same for the whole tokens of one step.

Legend: S steps, E experts, R ranks, N ranks with a copy of an expert.
"""

from __future__ import annotations

import numpy as np

from experts.placement.placement import Floats, Ints

MAX_SWEEPS = 200
LEVEL = 1e-3
"""Prices are level when a sweep moves no more than this share of the mean load anywhere."""


def share_evenly(loads_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S, E, R)``: as taking turns does it, each copy of an expert gets the same part."""
    return np.asarray(loads_SE[:, :, None] * (copies_ER / copies_ER.sum(1, keepdims=True)))


def share_by_price(loads_SE: Floats, copies_ER: Ints, max_sweeps: int = MAX_SWEEPS) -> Floats:
    """``(S, E, R)`` parts of each expert's load in each step that make the heaviest rank lightest.

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
    """Pour an amount over ranks of these prices as water would lie: ``(S, N)``."""
    ordered = np.sort(prices_SN, axis=1)
    levels = (amounts_S[:, None] + ordered.cumsum(1)) / np.arange(1, ordered.shape[1] + 1)
    wet = (levels > ordered).sum(1).clip(1) - 1
    level_S = np.take_along_axis(levels, wet[:, None], 1)
    return np.asarray((level_S - prices_SN).clip(0.0))
