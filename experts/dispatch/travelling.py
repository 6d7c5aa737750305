"""Rows between two halves of a dispatch and between two of a combine, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.assignment import Assignment, Ints
from experts.dispatch.base import Dispatched
from experts.dispatch.exchange import ExchangeError
from experts.dispatch.statistics import DispatchStatistics
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
        received: ``(rows, W)`` bytes, there after the wait: of all ranks' tokens, or of some.
        place_T: where rows of all ranks' tokens are among those received from others and, after
            them, its own; None where all have been received.
    """

    layer: int
    part: Assignment
    routing: Routing
    hidden_states: Tensor
    received: Tensor
    place_T: Ints | None
    wait: Wait

    def own_weights(self, like: Tensor) -> Tensor:
        """Of its tokens, if weights travel at all."""
        return self.routing.weights[:, : like.shape[1]]


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


class Together:
    """Time spent with the other ranks; what ends there has ended for good."""

    def __init__(self, statistics: DispatchStatistics) -> None:
        self._statistics = statistics
        self.broken: ExchangeError | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def __enter__(self) -> None:
        self.check()
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._statistics.seconds += time.perf_counter() - self._began
        if isinstance(error, ExchangeError):
            self.broken = error


def no_wait() -> None:
    """The rows are there."""
