"""A feed-forward block of one of several sizes for each token, or none (Duo-LLM).

A wide block is a sum of narrow ones, so a size is a set of experts that are visited together: the
big block all of its parts, the small one an expert of its own, skipping none. Legend: T rows,
C choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from routing.routing import UNUSED, Routing


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
