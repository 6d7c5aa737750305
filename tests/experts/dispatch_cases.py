"""Ranks that are threads of one process, and random layers for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.dispatch import ExchangeError
from experts.dispatch.exchange import PeerSockets
from experts.placement import Placement


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
    """An `Exchange` over a switchboard; rows arrive when they are waited for."""

    device, same_machine = torch.device("cpu"), False
    sockets: PeerSockets | None = None

    def __init__(self, board: Switchboard, rank: int) -> None:
        self.rank, self.size, self._board = rank, board.size, board

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

    def _meet(self) -> None:
        try:
            self._board.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeError(f"rank {self.rank} is alone") from error


def on_ranks(size: int, run: Callable[[ThreadExchange], Any]) -> list[Any]:
    """What `run` returns on each rank, or raises."""
    board = Switchboard(size)
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = run(ThreadExchange(board, rank))
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


def random_placement(experts: int, ranks: int, extra: int, seed: int) -> Placement:
    """Every expert somewhere, and about `extra` copies in any places, also twice on a rank."""
    random = np.random.default_rng(seed)
    slots = -(-(experts + min(extra, experts * (ranks - 1))) // ranks) * ranks
    chosen = list(range(experts)) + random.integers(0, experts, slots - experts).tolist()
    return Placement(tuple(random.permutation(chosen).tolist()), experts, ranks)
