"""Logical ranks: threads of one process that exchange rows, on a CPU or on one GPU.

    results = on_ranks(4, lambda exchange: AllToAllDispatcher(exchange, placements)...)

For tests, and to try expert parallelism where there is one device (`benchmarks.gpu`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experts.dispatch.exchange import ExchangeError, PeerSockets


@dataclass
class Switchboard:
    """Where the threads meet; a rank that leaves breaks the barrier for all."""

    size: int
    barrier: threading.Barrier = field(init=False)
    parts: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)
        self.parts = [[] for _ in range(self.size)]


class ThreadExchange:
    """An `Exchange` over a switchboard; rows arrive when they are waited for.

    Threads on a GPU share its default stream, so rows are there when a later operation reads them.
    """

    same_machine = False
    sockets: PeerSockets | None = None

    def __init__(self, board: Switchboard, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self._board = rank, board.size, board
        self.device = torch.device(device)

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        assert sent.is_contiguous()
        assert received.is_contiguous()
        assert len(sent) == sum(send_rows)
        assert len(received) == sum(receive_rows)
        assert send_rows[self.rank] == receive_rows[self.rank] == 0
        self._board.parts[self.rank] = list(sent.clone().split(list(send_rows)))
        self._meet()
        parts = [parts[self.rank] for parts in self._board.parts]
        assert [len(part) for part in parts] == list(receive_rows)
        self._meet()

        def wait() -> None:
            received.copy_(torch.cat(parts))

        return wait

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _meet(self) -> None:
        try:
            self._board.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeError(f"rank {self.rank} is alone") from error


def on_ranks(
    size: int, run: Callable[[ThreadExchange], Any], device: torch.device | str = "cpu"
) -> list[Any]:
    """Return what `run` returns on each rank, or raises."""
    board = Switchboard(size)
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = run(ThreadExchange(board, rank, device))
        except Exception as error:
            results[rank] = error
            if isinstance(error, ExchangeError):
                return  # the others notice by themselves
            board.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
