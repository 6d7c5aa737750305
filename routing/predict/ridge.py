"""Fitting a gate to rows that come before its own: ridge regression of low rank.

The map starts from what the real gate would do and is pulled back to it, so that few calibration
rows do no harm. How strongly is decided on rows kept aside.
Legend: R rows, H hidden, E experts, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from routing.predict.gate import Gate
from routing.routers import RouterRule

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
