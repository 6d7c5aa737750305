"""ReLU routing with a data-dependent number of experts (BlockFFN).

Every expert with a positive logit is visited; weights are the positive logits divided by their root
mean square over all experts. Legend: T rows, E experts, K most experts of any row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from routing.routing import UNUSED, Routing

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
