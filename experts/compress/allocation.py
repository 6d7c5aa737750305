"""Bits of every expert under one budget of bytes: a multiple-choice knapsack, solved exactly.

Each expert takes one of its widths; the sum of predicted damage is least among all choices whose
bytes fit (PMQ, with one budget for all layers and bytes in place of mean bits).
HiGHS solves it as an integer program. Legend: E experts of all layers, W widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.compress.statistics import LayerCalibration

Damage = NDArray[np.float64]
Sizes = NDArray[np.int64]
Choice = NDArray[np.int64]

_LARGEST_COST = 1e6
"""HiGHS stops at an absolute gap of 1e-6, which has to be small beside the costs."""


class AllocationError(ValueError):
    """No choice of widths fits into the budget, or every choice does."""


def allocate(damage_EW: Damage, sizes_EW: Sizes, budget: int) -> Choice:
    """The widths with the least total damage.

    Args:
        damage_EW: ``(E, W)`` finite, not negative; any unit.
        sizes_EW: ``(E, W)`` bytes, the first width the smallest.
        budget: most bytes.

    Returns:
        ``(E,)`` index of the width of each expert.

    Raises:
        AllocationError: the budget is below the smallest or above the largest choice.
        ValueError: a damage is not finite or negative.
    """
    # optional: for budgets
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    _check(damage_EW, sizes_EW, budget)
    count, widths = damage_EW.shape
    extra_EW, room = _beyond_least(sizes_EW, budget)
    cost_EW = damage_EW * (_LARGEST_COST / (damage_EW.max() or 1.0))
    one_each = kron(eye_array(count), np.ones((1, widths)), format="csr")
    total = csr_array(extra_EW.reshape(1, -1).astype(float))
    solved = milp(
        cost_EW.ravel(),
        constraints=LinearConstraint(
            vstack([one_each, total], format="csr"),
            np.append(np.ones(count), -np.inf),
            np.append(np.ones(count), room),
        ),
        bounds=Bounds(0, _possible(cost_EW, extra_EW, room).ravel().astype(float)),
        integrality=np.ones(cost_EW.size),
        options={"mip_rel_gap": 0.0},
    )
    assert solved.status == 0, solved.message
    choice: Choice = solved.x.reshape(count, widths).argmax(1)
    assert taken(sizes_EW, choice).sum() <= budget
    return choice


def taken(table_EW: NDArray, choice: Choice) -> NDArray:
    """``(E,)``: the entry of each expert's width."""
    taken_E: NDArray = np.take_along_axis(table_EW, choice[:, None], 1)[:, 0]
    return taken_E


def _beyond_least(sizes_EW: Sizes, budget: int) -> tuple[Sizes, int]:
    """The bytes of each width beyond the expert's smallest, and the budget left for them, both in
    the largest unit that divides all of them."""
    least_E1 = sizes_EW.min(1, keepdims=True)
    extra_EW = sizes_EW - least_E1
    unit = math.gcd(*np.unique(extra_EW).tolist()) or 1
    extra_EW //= unit
    return extra_EW, min((budget - int(least_E1.sum())) // unit, int(extra_EW.max(1).sum()))


def _possible(cost_EW: Damage, extra_EW: Sizes, room: int) -> NDArray[np.bool_]:
    """``(E, W)``: whether an optimal choice may have a width; leaves HiGHS few to choose from.

    With a price on room, the least sum of cost and price bounds every choice from below
    (Lagrange). A width is ruled out if that bound, with it, is above a choice known to fit.
    """
    low, high = 0.0, _LARGEST_COST + 1  # at this price every expert takes its least
    for _ in range(100):
        price = (low + high) / 2
        fits = taken(extra_EW, (cost_EW + price * extra_EW).argmin(1)).sum() <= room
        low, high = (low, price) if fits else (price, high)
    priced_EW = cost_EW + high * extra_EW
    known = _filled(cost_EW, extra_EW, room, priced_EW.argmin(1))
    bound = priced_EW.min(1).sum() - high * room
    most = taken(cost_EW, known).sum() + 1e-6
    possible: NDArray[np.bool_] = bound + priced_EW - priced_EW.min(1, keepdims=True) <= most
    np.put_along_axis(possible, known[:, None], True, 1)
    return possible


def _filled(cost_EW: Damage, extra_EW: Sizes, room: int, choice: Choice) -> Choice:
    """A choice that fits, with the room it leaves given to the widths that gain most a unit."""
    while True:
        more_EW = extra_EW - taken(extra_EW, choice)[:, None]
        left = room - taken(extra_EW, choice).sum()
        gain_EW = (taken(cost_EW, choice)[:, None] - cost_EW) / np.maximum(more_EW, 1)
        gain_EW[(more_EW <= 0) | (more_EW > left)] = 0.0
        expert, width = np.unravel_index(gain_EW.argmax(), gain_EW.shape)
        if gain_EW[expert, width] <= 0:
            return choice
        choice[expert] = width


def _check(damage_EW: Damage, sizes_EW: Sizes, budget: int) -> None:
    if not (np.isfinite(damage_EW).all() and (damage_EW >= 0).all()):
        raise ValueError("the predicted damage of some experts is negative or not finite")
    least, most = int(sizes_EW.min(1).sum()), int(sizes_EW.max(1).sum())
    if budget < least:
        raise AllocationError(
            f"the budget is {budget:,} bytes, and the experts take {least:,} at their fewest bits"
        )
    if budget > most:
        raise AllocationError(
            f"the budget is {budget:,} bytes, and the experts take {most:,} at their most bits"
        )


def predicted_damage(layers: Sequence[LayerCalibration]) -> Damage:
    """``(E, W)`` predicted damage of the experts of all layers, one layer after the other.

    What the whole model was measured to lose with one layer at some bits is divided among the
    layer's experts by their squared errors. `lab.compression` compares other models of
    damage, which do not know that layers differ.
    """
    found = []
    for layer in layers:
        least_W = layer.kl_W.cummin(0).values  # near 0, noise makes finer weights look worse
        shares_EW = layer.error_EW / layer.error_EW.sum(0).clamp_min(1e-300)
        found.append((least_W * shares_EW).double().numpy())
    return np.concatenate(found)
