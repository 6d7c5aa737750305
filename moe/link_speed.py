"""How fast ranks on one machine exchange rows: real all-to-alls of gloo, between threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moe.errors import ProfileError

ROUNDS = 20
LARGE_BYTES = 4 << 20
TIMEOUT = timedelta(seconds=20)


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
    """Between two ranks on this machine: gloo over its loopback interface, in half a second.

    Raises:
        ProfileError: gloo does not work here.
    """
    store = dist.HashStore()

    def run(rank: int) -> list[float]:
        group = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
        best = []
        for values in (1, LARGE_BYTES // 4):
            sent = torch.ones(2 * values)
            received = torch.empty_like(sent)
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                group.alltoall_base(received, sent, [], []).wait()  # type: ignore[attr-defined]
                times.append(time.perf_counter() - start)
            best.append(min(times))
        return best

    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(run, rank) for rank in range(2)]
        try:
            small, large = ranks[0].result()
        except RuntimeError as error:
            raise ProfileError(
                f"gloo does not work between two ranks on this machine: {error}; "
                "say how fast they exchange rows: --link GB/s,microseconds"
            ) from error
    return Link(LARGE_BYTES / max(large - small, 1e-9), small, "measured here, gloo over loopback")
