"""Balancing by a bias on the choice, without an auxiliary loss.

The bias is added to scores for the choice alone (`RouterRule.correction`) and moves after each
training step by what each expert got (arXiv 2408.15664). It is the dual price of a column of the
assignment problem, so the step is one of dual ascent; with rates that shrink as ``1 / t`` its
regret is logarithmic.
Legend: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from routing.routers import RouterRule
from routing.routing import UNUSED, Routing

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


# ---- Routing that neighbours take part in: each token's scores are mixed with those of earlier
# ones.
#
# Similarity-aware: by how alike tokens are; attention-aware: by the attention of the block before
# (a reading of its abstract). Legend: T tokens of one sequence, E experts, A heads, D head size.


def neighbour_scores(scores: Tensor, queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
    """``(T, E)``: scores of tokens that each token sees, itself and earlier ones, by attention.

    Args:
        scores: ``(T, E)``.
        queries, keys: ``(A, T, D)``.
        heads: ``(A,)`` shares of the heads, summing to 1.
    """
    affinity = queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5
    past = torch.ones(affinity.shape[1:], dtype=torch.bool, device=scores.device).tril()
    attention = affinity.masked_fill(~past, -float("inf")).softmax(-1)
    return torch.einsum("a,ats,sx->tx", heads, attention, scores)


def mixed_scores(own: Tensor, neighbours: Tensor, share: float) -> Tensor:
    """``(T, E)``: ``share`` of the neighbours' scores and the rest of the token's own."""
    return (1 - share) * own + share * neighbours


# ---- ReLU routing with a data-dependent number of experts (BlockFFN).
#
# Every expert with a positive logit is visited; weights are the positive logits divided by their
# root mean square over all experts. Legend: T rows, E experts, K most experts of any row.

_EPS = 1e-6


def relu_routing(logits: Tensor, weight: Tensor) -> Routing:
    """Ragged: ``(T, K)`` with unused slots behind the experts of each row, K at least 1.

    Args:
        logits: ``(T, E)``.
        weight: ``(E,)`` that normed logits are multiplied by.
    """
    active = logits > 0
    positive = logits.float().relu()
    size = torch.rsqrt(positive.pow(2).mean(-1, keepdim=True) + _EPS)
    most = max(int(active.sum(-1).max()), 1)
    ids = (~active).int().argsort(dim=-1, stable=True)[:, :most]
    used = active.gather(-1, ids)
    weights = (positive * size * weight).gather(-1, ids) * used
    return Routing(ids.masked_fill(~used, UNUSED), weights)


# ---- Selective Sinkhorn routing: a balanced plan for a batch of tokens.
#
# For a small share of training steps only: what a token gets depends on its batch. Legend: T
# tokens, E experts.


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


# ---- A feed-forward block of one of several sizes for each token, or none (Duo-LLM).
#
# A wide block is a sum of narrow ones, so a size is a set of experts that are visited together:
# the big block all of its parts, the small one an expert of its own, skipping none. Legend: T
# rows, C choices.


def size_routing(chosen: Tensor, weights: Tensor, members: Sequence[Sequence[int]]) -> Routing:
    """Ragged: each row visits all members of its choice with the same weight.

    Args:
        chosen: ``(T,)`` int64 in ``[0, C)``.
        weights: ``(T,)``.
        members: of each choice, experts in ascending order; none to skip the block.
    """
    slots = max(map(len, members))
    table = torch.full((len(members), slots), UNUSED, device=chosen.device)
    for choice, own in enumerate(members):
        table[choice, : len(own)] = torch.tensor(own, dtype=torch.int64)
    ids = table[chosen]
    return Routing(ids, weights.float()[:, None] * (ids != UNUSED))
