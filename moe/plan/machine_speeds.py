"""How fast this machine moves weights: short measurements, each a fraction of a second."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from offload.readers import choose_reader
from offload.transfer import Read

SAMPLE_BYTES = 256 << 20
"""Beyond any cache of a processor."""
PAGE = 4096
IN_FLIGHT = 8
MEASURE_S = 0.3


def memory_speed(device: torch.device) -> float:
    """Bytes a second at which the device sums up a large array, the best of some."""
    array = torch.ones(SAMPLE_BYTES // 4, dtype=torch.float32, device=device)
    return SAMPLE_BYTES / _best_of(5, lambda: array.sum().item())


def to_device_speed(device: torch.device) -> float:
    """Bytes a second from pinned host memory to a CUDA device."""
    source = torch.ones(SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return SAMPLE_BYTES / _best_of(3, copy)


def disk_speed(file: Path, block_bytes: int, reader: str = "auto") -> tuple[float, str]:
    """Bytes a second of random reads of blocks past the page cache, and what read them.

    Args:
        file: a large one on the disk in question; read, and not kept.
        block_bytes: of one read; rounded to pages.
        reader: as `offload.readers.choose_reader` knows them.

    Raises:
        OffloadError: the file cannot be read.
    """
    block = max(block_bytes // PAGE, 1) * PAGE
    count = max(file.stat().st_size // block, 1)
    block = min(block, file.stat().st_size)
    places = [torch.empty(block + PAGE, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
    places = [place[-place.data_ptr() % PAGE :][:block] for place in places]
    chosen = choose_reader(file, reader)
    fd = os.open(file, os.O_RDONLY)
    try:
        start, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - start < MEASURE_S:
            transfers = []
            for place in places:
                read = Read(fd, file, random.randrange(count) * block, place)
                transfers.append(chosen.submit([read], urgent=True))
            for transfer in transfers:
                transfer.wait()
            done += len(places) * block
        return done / (time.perf_counter() - start), chosen.name
    finally:
        chosen.close()
        os.close(fd)


def _best_of(rounds: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    run()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
