"""The arithmetic of sampling in main memory, a row at a time: numpy does there what `draws.py` does
for batches on a device, in a fraction of the calls and of the time.

Shape legend: V vocabulary, C candidates in falling order of their scores.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moe.sampling.params import SamplingParams

FIRST_GUESS = 256
"""Largest scores looked at before top-p sorts more of the vocabulary."""
BLOCK = 512  # tokens whose weights `position` sums before it looks at single ones


def on_host(numbers: Tensor) -> bool:
    """Return whether numpy reads them without a wait."""
    return numbers.is_cpu


def largest(scores_V: np.ndarray, count: int) -> np.ndarray:
    """``(count,)`` int64 ids of the largest float32 scores in falling order, ties by id; fewer if
    the row holds NaN."""
    # A partition leaves the order of ties open, so it only finds the threshold.
    size = len(scores_V)
    threshold = np.partition(scores_V, -count)[-count] if count < size else -np.inf
    above = (scores_V >= threshold).nonzero()[0]
    ids: np.ndarray = above[(-scores_V[above]).argsort(kind="stable")[:count]]
    return ids


def weights_of(scores: np.ndarray, peak: float, temperature: float) -> np.ndarray:
    """Unnormalised float64 probabilities; the largest is 1 at any temperature."""
    # Shifting first makes every temperature safe: the largest score stays 0 however small it is.
    weights = np.subtract(scores, peak, dtype=np.float64)
    with np.errstate(over="ignore"):
        weights /= temperature
    made: np.ndarray = np.exp(weights, out=weights)
    return made


def candidates(
    scores_V: np.ndarray, params: SamplingParams, peak: float
) -> tuple[np.ndarray | None, np.ndarray]:
    """Top-k, then top-p, then min-p, at a temperature above 0; see `moe.sampling.draws.nucleus`.

    Args:
        scores_V: float32, no NaN.
        peak: the largest of them, finite.

    Returns:
        ids_C: int64; None: all tokens in their order.
        weights_C: float64, the largest 1; 0 for what is not kept.
    """
    temperature, top_p, min_p = params.temperature, params.kept_mass, params.min_p
    size = top_k = min(params.top_k, len(scores_V))
    total = 0.0
    if not top_k:
        weights = weights_of(scores_V, peak, temperature)
        if top_p == 1.0:
            if min_p:
                weights *= weights >= min_p
            return None, weights
        size, total = min(FIRST_GUESS, len(scores_V)), float(weights.sum())
    while True:
        ids = largest(scores_V, size)
        weights = weights_of(scores_V[ids], peak, temperature)
        mass = weights.cumsum()
        goal = top_p * (mass[-1] if top_k else total)
        if top_k or size == len(scores_V) or mass[-1] >= goal:
            break
        size = min(16 * size, len(scores_V))
    kept = weights >= min_p
    if top_p < 1.0:
        kept &= mass - weights < goal  # the token that crosses the goal is kept
    return ids, weights * kept


def position(weights_C: np.ndarray, uniform: float) -> int:
    """A position drawn by inverting the cumulative weights; see `moe.sampling.draws.draw`.

    Args:
        weights_C: float64, not all 0.
        uniform: in [0, MOST_UNIFORM].
    """
    size, first, goal = len(weights_C), 0, np.inf
    if size > 2 * BLOCK:
        whole = size // BLOCK * BLOCK
        sums = weights_C[:whole].reshape(-1, BLOCK).sum(1)
        if whole < size:
            sums = np.append(sums, weights_C[whole:].sum())
        mass = sums.cumsum()
        goal = mass[-1] * uniform
        block = _first_above(mass, goal)
        goal, first = goal - (mass[block - 1] if block else 0.0), block * BLOCK
        weights_C = weights_C[first : first + BLOCK]
    mass = weights_C.cumsum()
    # A block's sum is rounded in another order: what is left may not lie below it.
    goal = min(goal, np.nextafter(mass[-1], 0.0)) if size > 2 * BLOCK else mass[-1] * uniform
    return first + _first_above(mass, goal)


def accepted(
    ids_C: np.ndarray | None,
    weights_C: np.ndarray,
    offered: tuple[np.ndarray, np.ndarray],
    proposed: int,
    uniform: float,
    again: float,
) -> int:
    """The proposed id as often as the weights allow, else another: `moe.sampling.draws.accepted`.

    Args:
        offered: ids and probabilities that the proposed one was drawn by.
        uniform, again: in [0, MOST_UNIFORM].
    """
    chances_C = weights_C / weights_C.sum()
    ids, chances = offered
    chance = float(chances[ids == proposed].sum())
    wanted = chances_C[proposed] if ids_C is None else chances_C[ids_C == proposed].sum()
    if uniform * chance < wanted:
        return proposed
    if ids_C is None:
        rest_C = chances_C.copy()
        rest_C[ids] -= chances
    else:
        order = ids.argsort()
        at = ids[order].searchsorted(ids_C).clip(max=len(ids) - 1)
        same = ids[order][at] == ids_C
        rest_C = chances_C - np.where(same, chances[order][at], 0.0)
    np.maximum(rest_C, 0.0, out=rest_C)
    # Nothing is left where both are the same up to rounding.
    place = position(rest_C if rest_C.any() else chances_C, again)
    return place if ids_C is None else int(ids_C[place])


def _first_above(mass: np.ndarray, goal: float) -> int:
    """The first position where the mass exceeds the goal, which lies below the last; so its weight
    is positive."""
    return min(int(mass.searchsorted(goal, "right")), len(mass) - 1)
