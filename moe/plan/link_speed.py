"""How fast ranks on one machine exchange rows: over local sockets, as dispatch does it."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from experts.dispatch import SocketExchange
from moe.errors import ProfileError

ROUNDS = 20
LARGE_BYTES = 4 << 20
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Link:
    """What ranks send over.

    Attributes:
        bytes_per_s: that one rank sends while it receives as many.
        seconds: that an exchange takes however little is sent.
        how: measured or given.
    """

    bytes_per_s: float
    seconds: float
    how: str

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.2f} GB/s a rank, {self.seconds * 1e6:.0f} µs ({self.how})"


def given_link(text: str, option: str) -> Link:
    """From ``GB/s,microseconds``.

    Raises:
        ProfileError: it is not that.
    """
    try:
        rate, latency = (float(part) for part in text.split(","))
    except ValueError:
        rate = latency = -1.0
    if not (0 < rate < float("inf") and 0 <= latency < float("inf")):
        raise ProfileError(
            f"{option} is {text!r}; it must be GB/s and microseconds, as in {option} 1.2,50"
        )
    return Link(rate * 1e9, latency * 1e-6, "given")


def measure_link() -> Link:
    """Between two ranks on this machine, in a fraction of a second: two threads stand for them."""
    ends = socket.socketpair()

    def run(rank: int) -> list[float]:
        exchange, best = SocketExchange(rank, {1 - rank: ends[rank]}, TIMEOUT_S), []
        for size in (1, LARGE_BYTES):
            sent, received = torch.ones(2, 1, size, dtype=torch.uint8)
            rows_R = [int(other != rank) for other in range(2)]
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                exchange.start(sent, received, rows_R, rows_R)()
                times.append(time.perf_counter() - start)
            best.append(min(times))
        exchange.close()
        return best

    with ThreadPoolExecutor(2) as threads:
        small, large = next(threads.map(run, range(2)))
    return Link(LARGE_BYTES / max(large - small, 1e-9), small, "measured here, local sockets")
