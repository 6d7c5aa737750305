"""Selective Sinkhorn routing: a balanced plan for a batch of tokens.

For a small share of training steps only: what a token gets depends on its batch. Legend: T tokens,
E experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from routing.routers.rule import RouterRule
from routing.routing import Routing


class Plan(NamedTuple):
    """A transport plan, and how many rounds it took; as many as were allowed if it is not exact."""

    shares: Tensor  # (T, E); rows sum to 1, columns to T / E
    rounds: int


def sinkhorn(
    worth: Tensor, temperature: float, max_rounds: int = 100, tolerance: float = 1e-4
) -> Plan:
    """The plan of most worth plus ``temperature`` times its entropy.

    Args:
        worth: ``(T, E)`` of each expert to each token: logits, or their softmax.
        tolerance: largest relative error of a column's sum; rows are exact.
    """
    tokens, experts = worth.shape
    kernel, level = worth.double() / temperature, math.log(tokens / experts)
    columns = torch.zeros(experts, dtype=kernel.dtype, device=kernel.device)
    plan, rounds = kernel, 0
    while rounds < max_rounds:
        rows = -(kernel + columns).logsumexp(1, keepdim=True)
        rounds += 1
        plan = (kernel + columns + rows).exp()
        if float((plan.sum(0) * experts / tokens - 1).abs().max()) <= tolerance:
            break
        columns = level - (kernel + rows).logsumexp(0)
    return Plan(plan.to(worth.dtype), rounds)


def balanced_routing(plan: Plan, top_k: int) -> Routing:
    """The ``top_k`` largest shares of each token, summing to 1. A plan in balance does not make
    these choices balanced, only nearer to it."""
    return RouterRule(top_k, renormalise=True).select(plan.shares)
