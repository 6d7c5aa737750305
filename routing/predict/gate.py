"""A router's gate as plain numbers: how rows become the scores by which experts are chosen.

Predictors put rows into it that the router itself has not seen yet. A step has few rows, so numpy,
whose calls cost a fraction of torch's, does the arithmetic.
Legend: T rows, H hidden, E experts, K top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from routing.predict.base import Floats

Score = Literal["logits", "softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]

_OUT_OF_REACH = -50.0
"""Margin of an expert that no row can choose now: its group is not among the kept ones."""


@dataclass(frozen=True)
class Rule:
    """Which K experts a router takes, given the logits of all.

    The largest of score + correction are taken, within the ``groups_kept`` best groups (by their
    largest score, or the sum of their two largest). Softmax keeps the order of logits: where
    nothing is added and there are no groups, ``"logits"`` is the same and costs less.
    """

    top_k: int
    score: Score = "logits"
    correction: Tensor | None = None  # (E,)
    groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = "max"

    def scores(self, logits: Floats) -> Floats:
        """``(T, E)`` numbers whose ``top_k`` largest are chosen; -inf in groups left out."""
        scores = logits
        if self.score == "sigmoid":
            scores = sigmoid(logits)
        elif self.score == "softmax":
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            scores = powers / powers.sum(-1, keepdims=True)
        if self.correction is not None:
            scores = scores + self.correction.numpy()
        if self.groups == 1:
            return scores
        grouped = scores.reshape(len(scores), self.groups, -1)
        members = 1 if self.group_score == "max" else 2
        best = np.sort(grouped, -1)[..., -members:].sum(-1)
        kept = np.argsort(-best, -1, kind="stable")[:, : self.groups_kept, None]
        masked = np.full_like(grouped, -np.inf)
        np.put_along_axis(masked, kept, np.take_along_axis(grouped, kept, 1), 1)
        return masked.reshape(scores.shape)

    def margins(self, logits: Floats) -> Floats:
        """``(T, E)``: by how much each expert's score is above the middle between the last that is
        chosen and the first that is not, in units of the row's spread around it. Evidence, not yet
        a probability."""
        scores, count = self.scores(logits), logits.shape[-1]
        if count <= self.top_k:
            return np.full_like(scores, -_OUT_OF_REACH)
        edges = np.partition(scores, (count - self.top_k - 1, count - self.top_k), -1)
        last, first_left = edges[:, count - self.top_k], edges[:, count - self.top_k - 1]
        edge = (last + np.where(first_left > -np.inf, first_left, last)) / 2
        apart: Floats = np.subtract(scores, edge[:, None])
        if self.groups == 1:
            alone: Floats = np.divide(apart, _spread(apart))
            return alone
        reach = np.isfinite(apart)
        finite = np.where(reach, apart, np.float32(0))
        margins: Floats = np.divide(finite, _spread(finite))
        margins[~reach] = _OUT_OF_REACH
        return margins


def sigmoid(odds: Floats) -> Floats:
    """Without overflow warnings: what is beyond 60 is as good as certain."""
    probability: Floats = np.reciprocal(1 + np.exp(np.minimum(-odds, 60.0)))
    return probability


def _spread(apart: Floats) -> Floats:
    squares: Floats = np.einsum("ij,ij->i", apart, apart)[:, None]
    spread: Floats = np.sqrt(squares / apart.shape[-1]) + np.float32(1e-6)
    return spread


@dataclass(frozen=True)
class Gate:
    """``logits = x W^T + bias``, and the rule that chooses by them."""

    weight: Tensor  # (E, H) float32, or (E, r) after ``down``
    rule: Rule
    bias: Tensor | None = None  # (E,) float32
    down: Tensor | None = None  # (r, H) float32, of a gate of low rank

    def logits(self, rows: Floats) -> Floats:
        """``(T, E)`` of rows ``(T, H)``."""
        if self.down is not None:
            rows = rows @ self.down.numpy().T
        logits: Floats = rows @ self.weight.numpy().T
        return logits if self.bias is None else logits + self.bias.numpy()

    def margins(self, rows: Floats) -> Floats:
        """Evidence ``(T, E)`` of rows ``(T, H)``: see `Rule.margins`."""
        return self.rule.margins(self.logits(rows))

    def choose(self, rows: Floats) -> NDArray[np.int64]:
        """Experts ``(T, K)`` that the rule takes, in ascending order."""
        order = np.argsort(-self.rule.scores(self.logits(rows)), -1, kind="stable")
        return np.sort(order[:, : self.rule.top_k], -1)
