"""Routing that neighbours take part in: each token's scores are mixed with those of earlier ones.

Similarity-aware: by how alike tokens are; attention-aware: by the attention of the block before
(a reading of its abstract). Legend: T tokens of one sequence, E experts, A heads,
D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
