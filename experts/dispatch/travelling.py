"""Rows between two halves of a dispatch and between two of a combine, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.agreement import Bytes
from experts.dispatch.assignment import Assignment
from experts.dispatch.at_once import ArrivedAtOnce
from experts.dispatch.base import Dispatched
from experts.dispatch.exchange import Exchange, ExchangeError
from experts.dispatch.statistics import DispatchStatistics

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


class Together:
    """Time spent with the other ranks; what ends there has ended for good."""

    def __init__(self, statistics: DispatchStatistics) -> None:
        self._statistics = statistics
        self.broken: ExchangeError | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def __enter__(self) -> None:
        if self.broken is not None:
            raise self.broken
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._statistics.seconds += time.perf_counter() - self._began
        if isinstance(error, ExchangeError):
            self.broken = error

    def start(
        self, exchange: Exchange, message: Tensor, send_R: Sequence[int], receive_R: Sequence[int]
    ) -> tuple[Tensor, Wait]:
        """Begin to send rows of bytes to the others; theirs, there after the wait."""
        to_R, from_R = [*send_R], [*receive_R]
        to_R[exchange.rank] = from_R[exchange.rank] = 0
        received = message.new_empty(sum(from_R), message.shape[1])
        with self:
            wait = exchange.start(message, received, to_R, from_R)
        return received, wait
