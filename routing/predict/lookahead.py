"""Look-ahead: put what layer l's experts read through the router of layer l + 1, l + 2.

A layer changes the residual stream little, so a later router often chooses the same experts for
the rows of an earlier layer. The real gate (raw look-ahead) needs no training; a low-rank gate
fitted on calibration rows also learns the change between the layers (in the way of M2R2, but
without training the model). A step has few rows, so numpy does the arithmetic: its calls cost a
fraction of torch's.
Legend: R calibration rows, T rows, H hidden, E experts, K top_k, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing.predict.ensemble import EvidenceSource, Tensors, floats
from routing.predict.forecast import Floats
from routing.routers import RouterRule
from routing.routing import Routing

REACH = 2
"""Most MoE layers ahead: farther away, the tokens alone tell as much."""

ANY_DISTANCE = 0

RANK = 32
"""Highest rank of fitted gates."""

_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge penalties to try, in units of the mean square of a row's elements."""

_UNREACHABLE = -50.0
"""Margin of an expert whose group the router does not keep for this row."""


@dataclass(frozen=True)
class Gate:
    """``logits = x W^T + bias``, and the rule that chooses by them."""

    weight: Tensor  # (E, H) float32, or (E, r) after ``down``
    rule: RouterRule
    bias: Tensor | None = None  # (E,) float32
    down: Tensor | None = None  # (r, H) float32, of a low-rank gate

    def logits(self, rows: Floats) -> Floats:
        """``(T, E)`` for rows ``(T, H)``."""
        if self.down is not None:
            rows = rows @ self.down.numpy().T
        logits: Floats = rows @ self.weight.numpy().T
        return logits if self.bias is None else logits + self.bias.numpy()

    def margins(self, rows: Floats) -> Floats:
        """Evidence ``(T, E)`` for rows ``(T, H)``: see `margins`."""
        return margins(self.rule, self.logits(rows))

    def choose(self, rows: Floats) -> NDArray[np.int64]:
        """The experts ``(T, K)`` that the rule takes, ids ascending."""
        scores = self.rule.scores(torch.from_numpy(self.logits(rows)))
        chosen: NDArray[np.int64] = self.rule.select(scores).expert_ids.numpy()
        return chosen


class Lookahead(EvidenceSource):
    """Evidence from gates, by target layer and distance (or `ANY_DISTANCE`)."""

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
        return None if gate is None else gate.margins(self._rows)

    def tensors(self) -> Tensors:
        """All numbers but the rules."""
        return {
            f"{target}.{distance}.{part}": tensor
            for (target, distance), gate in self._gates.items()
            for part, tensor in (("weight", gate.weight), ("bias", gate.bias), ("down", gate.down))
            if tensor is not None
        }


def margins(rule: RouterRule, logits: Floats) -> Floats:
    """Return how far each expert is above the threshold between chosen and not chosen.

    The threshold is the middle between the last expert that the rule chooses and the next one. It
    compares logits if the rule keeps their order, else the rule's scores.

    Args:
        logits: ``(T, E)``.

    Returns:
        ``(T, E)``, divided by the row's root mean square distance from the threshold.
    """
    count, top_k = logits.shape[-1], rule.top_k
    if count <= top_k:
        return np.full_like(logits, -_UNREACHABLE)
    ranking = logits if rule.keeps_order else _ranking(rule, logits)
    edges = np.partition(ranking, (count - top_k - 1, count - top_k), -1)
    last, first_left = edges[:, count - top_k], edges[:, count - top_k - 1]
    edge = (last + np.where(first_left > -np.inf, first_left, last)) / 2
    apart: Floats = np.subtract(ranking, edge[:, None])
    if rule.groups == 1:
        alone: Floats = np.divide(apart, _spread(apart))
        return alone
    reachable = np.isfinite(apart)
    finite = np.where(reachable, apart, np.float32(0))
    evidence: Floats = np.divide(finite, _spread(finite))
    evidence[~reachable] = _UNREACHABLE
    return evidence


def _ranking(rule: RouterRule, logits: Floats) -> Floats:
    ranking: Floats = rule.ranking(rule.scores(torch.from_numpy(logits))).numpy()
    return ranking


def _spread(apart: Floats) -> Floats:
    squares: Floats = np.einsum("ij,ij->i", apart, apart)[:, None]
    spread: Floats = np.sqrt(squares / apart.shape[-1]) + np.float32(1e-6)
    return spread


def fit_gate(rows: Tensor, logits: Tensor, rule: RouterRule, start: Tensor | None) -> Gate:
    """Fit a gate of rank at most `RANK` that gives ``logits`` for ``rows``, by ridge regression.

    The penalty pulls the weight towards ``start``, so that few calibration rows do no harm.

    Args:
        rows: ``(R, H)``, R >= 2, of an earlier layer.
        logits: ``(R, E)`` of the real gate for the same tokens.
        rule: of the real gate.
        start: ``(E, H)``, usually the real gate's weight; None for zero.
    """
    rows, logits = rows.float(), logits.float()
    base = torch.zeros(logits.shape[1], rows.shape[1]) if start is None else start.float()
    weight, bias = _ridge(rows, logits, base)
    rank = min(RANK, *weight.shape)
    if rank == min(weight.shape):
        return Gate(weight.contiguous(), rule, bias)
    # Reduce the rank so that most of the output is kept: along the principal directions of the
    # output, not of the weight.
    made = rows @ weight.T
    _, _, directions = torch.linalg.svd(_moments(made), full_matrices=False)
    up = directions[:rank].T.contiguous()
    shift = made.mean(0)
    return Gate(up, rule, bias + shift - up @ (up.T @ shift), down=(up.T @ weight).contiguous())


def _ridge(rows: Tensor, logits: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Weight ``(E, H)`` and bias, with the penalty that is best on the last fifth of the rows."""
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
