"""Rows between two halves of a dispatch and between two of a combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.agreement import Bytes
from experts.dispatch.assignment import Assignment
from experts.dispatch.at_once import ArrivedAtOnce
from experts.dispatch.base import Dispatched

Wait = Callable[[], None]


@dataclass
class Sent:
    """Tokens on their way.

    Attributes:
        layer: MoE layer.
        part: of this rank.
        weights: of its tokens.
        hidden, dtype: of a row.
        rows: ``(tokens, W)`` bytes of each rank's tokens, where all have come.
        coming: else those of tokens that others bring here, its own, and the wait for the former.
    """

    layer: int
    part: Assignment
    weights: Tensor
    hidden: int
    dtype: torch.dtype
    rows: Sequence[Bytes] | None
    coming: tuple[Tensor, Tensor, Wait] | None


@dataclass
class Arrived(Dispatched):
    """Rows that this rank serves: those of other ranks in their order, then its own."""

    sent: Sent


@dataclass
class Returning:
    """Results on their way back.

    Attributes:
        come: ``(results, H)`` of other ranks for the tokens of this one, there after the wait.
        stay: ``(results, H)`` of its own.
        position: ``(T, ...)`` of each token's results in those and then these, negative for none.
        weights: of each of those results.
        dtype: of the sum.
    """

    come: Tensor
    stay: Tensor
    position: Tensor
    weights: Tensor
    dtype: torch.dtype
    wait: Wait


Arriving = Arrived | ArrivedAtOnce
