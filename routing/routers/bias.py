"""Balancing by a bias on the choice, without an auxiliary loss.

The bias is added to scores for the choice alone (`RouterRule.correction`) and moves after each
training step by what each expert got (arXiv 2408.15664). It is the dual price of a column of the
assignment problem, so the step is one of dual ascent; with rates that shrink as ``1 / t`` its
regret is logarithmic.
Legend: E experts.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Step = Literal["sign", "error"]


def bias_step(bias: Tensor, tokens: Tensor, rate: float, step: Step = "sign") -> Tensor:
    """The bias after a training step.

    Args:
        bias: ``(E,)``.
        tokens: ``(E,)`` that each expert got in this step.
        rate: of score for a sign, or for an expert that got nothing (``error``: in proportion to
            the shortfall).
    """
    shortfall = 1 - tokens / tokens.float().mean().clamp_min(1e-9)
    move = shortfall.sign() if step == "sign" else shortfall
    return bias + rate * move


def dual_rate(step: int, curvature: float) -> float:
    """Rate of the ``step``-th update, from 1 on, of an objective that curves at least so much."""
    return 1.0 / (curvature * step)
