"""Rules of routers from the literature that `moe` does not need to serve pretrained models.

- Balancing without an auxiliary loss: `bias_step`, `dual_rate` (arXiv 2408.15664, 2512.03915).
- Similarity- and attention-aware routing: `neighbour_scores`, `mixed_scores` (arXiv 2505.00792).
- ReLU routing with a data-dependent number of experts: `relu_routing` (BlockFFN, arXiv 2507.08771).
- Selective Sinkhorn routing: `sinkhorn`, `balanced_routing` (arXiv 2511.08972).
- Blocks of several sizes: `size_routing` (Duo-LLM).

Legend: T tokens, E experts, K most experts of any token, A heads, D head size, C choices.
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

_EPS = 1e-6


def bias_step(bias: Tensor, tokens: Tensor, rate: float, step: Step = "sign") -> Tensor:
    """The selection bias after a training step.

    The bias is added to scores for the choice alone (`RouterRule.correction`). It is the dual price
    of a column of the assignment problem, so this is a step of dual ascent.

    Args:
        bias: ``(E,)``.
        tokens: ``(E,)`` that each expert got in this step.
        rate: how far the bias moves: always (``sign``), or for an expert that got nothing, and in
            proportion for others (``error``).
    """
    shortfall = 1 - tokens / tokens.float().mean().clamp_min(1e-9)
    move = shortfall.sign() if step == "sign" else shortfall
    return bias + rate * move


def dual_rate(step: int, curvature: float) -> float:
    """Rate of the ``step``-th update, from 1 on; regret is then logarithmic."""
    return 1.0 / (curvature * step)


def neighbour_scores(scores: Tensor, queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
    """``(T, E)``: the scores of a sequence's earlier tokens and its own, averaged by attention.

    By how alike tokens are (similarity-aware), or by the attention of the layer (attention-aware, a
    reading of its abstract).

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


def relu_routing(logits: Tensor, weight: Tensor) -> Routing:
    """Every expert with a positive logit; weights are the logits over their root mean square.

    Ragged: ``(T, K)`` with unused slots behind the experts of each row, K at least 1.

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


class TransportPlan(NamedTuple):
    """A transport plan, and the rounds it took: the most allowed if it is not exact."""

    shares: Tensor  # (T, E); rows sum to 1, columns to T / E
    rounds: int


def sinkhorn(
    worth: Tensor, temperature: float, max_rounds: int = 100, tolerance: float = 1e-4
) -> TransportPlan:
    """The balanced plan of most worth plus ``temperature`` times its entropy.

    For a small share of training steps only, as a token's experts depend on its batch.

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
    return TransportPlan(plan.to(worth.dtype), rounds)


def balanced_routing(plan: TransportPlan, top_k: int) -> Routing:
    """The ``top_k`` largest shares of each token, summing to 1. A plan in balance does not make
    these choices balanced, only nearer to it."""
    return RouterRule(top_k, renormalise=True).select(plan.shares)


def size_routing(chosen: Tensor, weights: Tensor, members: Sequence[Sequence[int]]) -> Routing:
    """A feed-forward block of one of several sizes for each token, or none.

    A wide block is a sum of narrow ones, so a size is a set of experts that are visited together,
    with the same weight: the big block all of its parts, the small one an expert of its own.

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
