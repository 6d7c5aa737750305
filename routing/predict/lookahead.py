"""A router's gate as plain numbers: how rows become evidence of the experts that it will choose.

Predictors put rows into it that the router itself has not seen yet. A step has few rows, so numpy,
whose calls cost a fraction of torch's, does the arithmetic.
Legend: T rows, H hidden, E experts, K top_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing.predict.forecast import EvidenceSource, Floats, Tensors, floats
from routing.routers import RouterRule
from routing.routing import Routing

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


# ---- Later gates on earlier rows: what layer l reads, put into the gate of layer l + 1, l + 2,
# ...
#
# A layer changes the residual stream little, so a later gate often chooses the same experts for
# the rows of an earlier layer. Raw, it needs no training at all; a low-rank map fitted on
# calibration rows foresees the change between the layers (the training-free relative of M2R2).
# Legend: R calibration rows, T rows, H hidden, E experts.

REACH = 2
"""MoE layers ahead at most: beyond, tokens alone tell as much."""

ANY_DISTANCE = 0


class Lookahead(EvidenceSource):
    """Gates by target layer and distance (or `ANY_DISTANCE`), for the rows that experts read."""

    reach: int | None = REACH

    def __init__(self, name: str, gates: Mapping[tuple[int, int], Gate]) -> None:
        self.name = name
        self._gates = dict(gates)
        self._layer = -1
        self._rows: Floats | None = None

    def start(self, tokens: Tensor) -> None:
        del tokens
        self._rows = None

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        del routing
        self._layer, self._rows = layer, floats(hidden_states)

    def evidence(self, layer: int, target: int) -> Floats | None:
        distance = target - layer
        if self._rows is None or layer != self._layer or not 1 <= distance <= REACH:
            return None
        gate = self._gates.get((target, distance)) or self._gates.get((target, ANY_DISTANCE))
        if gate is None:
            return None
        return gate.margins(self._rows)

    def tensors(self) -> Tensors:
        return gate_tensors({f"{t}.{d}": gate for (t, d), gate in self._gates.items()})


def gate_tensors(gates: Mapping[str, Gate]) -> Tensors:
    """All numbers of gates but for their rules."""
    return {
        f"{key}.{part}": tensor
        for key, gate in gates.items()
        for part, tensor in (("weight", gate.weight), ("bias", gate.bias), ("down", gate.down))
        if tensor is not None
    }


# ---- Fitting a gate to rows that come before its own: ridge regression of low rank.
#
# The map starts from what the real gate would do and is pulled back to it, so that few
# calibration rows do no harm. How strongly is decided on rows kept aside. Legend: R rows, H
# hidden, E experts, r rank.

RANK = 32
_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Of the pull, in units of the mean square of a row's elements."""


def fit_gate(rows: Tensor, logits: Tensor, rule: RouterRule, start: Tensor | None) -> Gate:
    """A gate of rank at most `RANK` that gives ``logits`` for ``rows``.

    Args:
        rows: ``(R, H)``, R >= 2.
        logits: ``(R, E)`` of the real gate, on what it read for the same tokens.
        rule: of the real gate.
        start: ``(E, H)`` weight to start from; None for zero.
    """
    rows, logits = rows.float(), logits.float()
    base = torch.zeros(logits.shape[1], rows.shape[1]) if start is None else start.float()
    weight, bias = _ridge(rows, logits, base)
    rank = min(RANK, *weight.shape)
    if rank == min(weight.shape):
        return Gate(weight.contiguous(), rule, bias)
    # The best map of low rank is the one that keeps most of what comes out, so the output's
    # principal directions decide and not the weight's.
    made = rows @ weight.T
    _, _, directions = torch.linalg.svd(_moments(made), full_matrices=False)
    up = directions[:rank].T.contiguous()
    shift = made.mean(0)
    return Gate(up, rule, bias + shift - up @ (up.T @ shift), down=(up.T @ weight).contiguous())


def _ridge(rows: Tensor, logits: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Weight ``(E, H)`` and bias, with the strength that is best on the last fifth of the rows."""
    cut = max(len(rows) * 4 // 5, 1)
    residual = logits - rows @ base.T
    mean, shift = rows[:cut].mean(0), residual[:cut].mean(0)
    moments = _moments(rows[:cut]).double()
    products = ((rows[:cut] - mean).T @ (residual[:cut] - shift)).double() / cut
    unit = moments.diagonal().mean().clamp_min(1e-12)
    best: tuple[float, Tensor] | None = None
    for strength in _STRENGTHS:
        pulled = moments + strength * unit * torch.eye(len(moments), dtype=torch.float64)
        factor = torch.linalg.cholesky(pulled)
        change = torch.cholesky_solve(products, factor).float().T
        rest = (rows[cut:] - mean) @ change.T + shift - residual[cut:]
        error = float(rest.pow(2).mean()) if len(rest) else strength
        if best is None or error < best[0]:
            best = error, change
    assert best is not None
    return base + best[1], shift - best[1] @ mean


def _moments(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(0)
    return centred.T @ centred / len(rows)
