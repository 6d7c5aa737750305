"""Which tokens may be drawn, with what weight, and the draw itself.

Temperature, top-k, top-p and min-p on one row of scores; ties go to the lower token id everywhere.
In numpy, whose calls on a row take a few microseconds: a small model has few hundred for a step.
Shape suffixes: T rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.sampling.params import SamplingParams

_FIRST_GUESS = 256  # largest scores looked at before top-p sorts more of the vocabulary


def row_of(logits_V: Tensor) -> np.ndarray:
    """Logits of any float dtype and device in float64."""
    row: np.ndarray = logits_V.detach().to("cpu", torch.float64).numpy()
    return row


def peaks(logits_TV: Tensor) -> tuple[list[int], list[float]]:
    """Of each row the id of the largest logit, and that one; NaN is larger than all."""
    if not logits_TV.is_cpu:
        values, ids = logits_TV.max(-1)
        return ids.tolist(), values.tolist()
    rows = (logits_TV.float() if logits_TV.dtype == torch.bfloat16 else logits_TV).detach().numpy()
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()


def candidates(scores_V: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn and their unnormalised weights (float64, largest = 1).

    `scores_V` is float64 with a finite maximum. Top-p keeps the shortest run of the most likely
    tokens whose mass reaches `top_p` (Holtzman et al. 2019), min-p those at least `min_p` times
    as likely as the most likely one (Nguyen et al. 2024). Returns ids_C int64 and weights_C.
    """
    # Shifting first makes every temperature safe: the largest score stays 0 however small it is.
    with np.errstate(over="ignore"):
        weights_V = np.exp((scores_V - scores_V.max()) / params.temperature)
    vocab_size = len(scores_V)
    top_k = min(params.top_k, vocab_size) or vocab_size
    if top_k == vocab_size and params.top_p == 1.0:
        if params.min_p == 0.0:
            return np.arange(vocab_size), weights_V
        ids_C = (weights_V >= params.min_p).nonzero()[0]
        return ids_C, weights_V[ids_C]
    ids_C = _nucleus(scores_V, weights_V, top_k, params.top_p)
    ids_C = ids_C[weights_V[ids_C] >= params.min_p]
    return ids_C, weights_V[ids_C]


def _nucleus(scores_V: np.ndarray, weights_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids of the top-p set within the `top_k` largest scores, in falling order."""
    if top_p == 1.0:
        return largest(scores_V, top_k)
    whole = top_k == len(scores_V)
    size = min(_FIRST_GUESS, top_k) if whole else top_k
    total = weights_V.sum() if whole else None
    while True:
        ids_C = largest(scores_V, size)
        mass_C = weights_V[ids_C].cumsum()
        goal = top_p * (mass_C[-1] if total is None else total)
        if size == top_k or mass_C[-1] >= goal:
            # The token that crosses the goal is kept, hence the mass before it decides.
            return ids_C[(mass_C - weights_V[ids_C]) < goal]
        size = min(16 * size, top_k)


def largest(scores_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest scores in falling order; equal scores by rising id."""
    if count == len(scores_V):
        return (-scores_V).argsort(kind="stable")
    # A partition leaves the order of ties open, so it only finds the threshold.
    ids = (scores_V >= np.partition(scores_V, -count)[-count]).nonzero()[0]
    return ids[(-scores_V[ids]).argsort(kind="stable")[:count]]


def draw(weights_C: np.ndarray, uniform: float) -> int:
    """Position drawn by inverting the cumulative weights; `uniform` lies in [0, 1)."""
    mass_C = weights_C.cumsum()
    position = mass_C.searchsorted(uniform * mass_C[-1], side="right")
    # Rounding can carry the product up to the total: the last position of positive weight.
    return int(min(position, mass_C.searchsorted(mass_C[-1])))


class Proposal(NamedTuple):
    """A token drawn from other probabilities than those it is to be judged by.

    Attributes:
        token_id: one of ids_C.
        ids_C: int64, distinct, in any order.
        chances_C: float64, their probabilities.
    """

    token_id: int
    ids_C: np.ndarray
    chances_C: np.ndarray

    @property
    def chance(self) -> float:
        """Of the token."""
        return float(self.chances_C[self.ids_C == self.token_id].item())


def draw_judged(
    ids_C: np.ndarray, weights_C: np.ndarray, proposal: Proposal, uniform: Callable[[], float]
) -> int:
    """An id of ids_C with the chances that the weights say, and as often as possible the proposed.

    Rejection sampling (Leviathan et al. 2023): the proposed token is taken with probability
    ``min(1, p / q)``, else one is drawn from what ``p`` has more than ``q``.

    Args:
        ids_C, weights_C: as of `candidates`.
        uniform: gives numbers in [0, 1).
    """
    chances_C = weights_C / weights_C.sum()
    wanted = float(chances_C[ids_C == proposal.token_id].sum())
    if uniform() * proposal.chance < wanted:
        return proposal.token_id
    order = proposal.ids_C.argsort()
    known = proposal.ids_C[order]
    place_C = known.searchsorted(ids_C).clip(max=len(known) - 1)
    offered_C = np.where(known[place_C] == ids_C, proposal.chances_C[order][place_C], 0.0)
    rest_C = (chances_C - offered_C).clip(min=0.0)
    if not rest_C.sum() > 0:  # the same up to rounding
        rest_C = chances_C
    return int(ids_C[draw(rest_C, uniform())])
