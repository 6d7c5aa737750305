"""The time that a rank spends with the others, and what has ended it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from experts.dispatch.exchange import Exchange, ExchangeError
from experts.dispatch.statistics import DispatchStatistics


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
    ) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send rows of bytes to the others; theirs, there after the wait."""
        to_R, from_R = [*send_R], [*receive_R]
        to_R[exchange.rank] = from_R[exchange.rank] = 0
        received = message.new_empty(sum(from_R), message.shape[1])
        with self:
            wait = exchange.start(message, received, to_R, from_R)
        return received, wait
