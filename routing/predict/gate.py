"""A router's gate as plain numbers: how rows become evidence of the experts that it will choose.

Predictors put rows into it that the router itself has not seen yet. A step has few rows, so numpy,
whose calls cost a fraction of torch's, does the arithmetic.
Legend: T rows, H hidden, E experts, K top_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing.predict.base import Floats
from routing.routers import RouterRule

_OUT_OF_REACH = -50.0
"""Margin of an expert that no row can choose now: its group is not among the kept ones."""


@dataclass(frozen=True)
class Gate:
    """``logits = x W^T + bias``, and the rule that chooses by them."""

    weight: Tensor  # (E, H) float32, or (E, r) after ``down``
    rule: RouterRule
    bias: Tensor | None = None  # (E,) float32
    down: Tensor | None = None  # (r, H) float32, of a gate of low rank

    def logits(self, rows: Floats) -> Floats:
        """``(T, E)`` of rows ``(T, H)``."""
        if self.down is not None:
            rows = rows @ self.down.numpy().T
        logits: Floats = rows @ self.weight.numpy().T
        return logits if self.bias is None else logits + self.bias.numpy()

    def margins(self, rows: Floats) -> Floats:
        """Evidence ``(T, E)`` of rows ``(T, H)``: see `margins`."""
        return margins(self.rule, self.logits(rows))

    def choose(self, rows: Floats) -> NDArray[np.int64]:
        """Experts ``(T, K)`` that the rule takes, in ascending order."""
        scores = self.rule.scores(torch.from_numpy(self.logits(rows)))
        chosen: NDArray[np.int64] = self.rule.select(scores).expert_ids.numpy()
        return chosen


def margins(rule: RouterRule, logits: Floats) -> Floats:
    """By how much each expert is above the middle between the last chosen and the first that is
    not.

    Args:
        logits: ``(T, E)``.

    Returns:
        ``(T, E)`` in units of the row's spread around that middle. Of logits where those keep the
        order, else of what the rule compares. Evidence, not yet a probability.
    """
    count, top_k = logits.shape[-1], rule.top_k
    if count <= top_k:
        return np.full_like(logits, -_OUT_OF_REACH)
    ranking = logits if rule.keeps_order else _ranking(rule, logits)
    edges = np.partition(ranking, (count - top_k - 1, count - top_k), -1)
    last, first_left = edges[:, count - top_k], edges[:, count - top_k - 1]
    edge = (last + np.where(first_left > -np.inf, first_left, last)) / 2
    apart: Floats = np.subtract(ranking, edge[:, None])
    if rule.groups == 1:
        alone: Floats = np.divide(apart, _spread(apart))
        return alone
    reach = np.isfinite(apart)
    finite = np.where(reach, apart, np.float32(0))
    evidence: Floats = np.divide(finite, _spread(finite))
    evidence[~reach] = _OUT_OF_REACH
    return evidence


def _ranking(rule: RouterRule, logits: Floats) -> Floats:
    ranking: Floats = rule.ranking(rule.scores(torch.from_numpy(logits))).numpy()
    return ranking


def sigmoid(odds: Floats) -> Floats:
    """Without overflow warnings: what is beyond 60 is as good as certain."""
    probability: Floats = np.reciprocal(1 + np.exp(np.minimum(-odds, 60.0)))
    return probability


def _spread(apart: Floats) -> Floats:
    squares: Floats = np.einsum("ij,ij->i", apart, apart)[:, None]
    spread: Floats = np.sqrt(squares / apart.shape[-1]) + np.float32(1e-6)
    return spread
