"""Rows between two halves of a dispatch, and between two of a combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.assignment import Assignment
from experts.dispatch.base import Dispatched
from routing import Routing

Wait = Callable[[], None]


@dataclass
class Sent:
    """Tokens on their way.

    Attributes:
        layer: MoE layer.
        part: of this rank.
        routing: of its tokens.
        hidden_states: of its tokens, as all ranks see them.
        received: ``(rows, W)`` bytes from the others, there after the wait.
    """

    layer: int
    part: Assignment
    routing: Routing
    hidden_states: Tensor
    received: Tensor
    wait: Wait


@dataclass
class Arrived(Dispatched):
    """Rows that this rank serves: those of other ranks in their order, then its own."""

    sent: Sent


@dataclass
class Returning:
    """Results on their way back.

    Attributes:
        rows: ``(results, H)`` for the tokens of this rank, there after the wait.
        position: ``(T, ...)`` of each token's results in them, -1 for none.
        weights: of each of those results.
        dtype: of the sum.
    """

    rows: Tensor
    position: Tensor
    weights: Tensor
    dtype: torch.dtype
    wait: Wait
