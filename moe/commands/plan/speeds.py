"""Bandwidths of this machine: weights in memory, disk, the link between ranks (local sockets, as
the dispatcher uses them).

`MachineSpeeds` knows what a plan of this day has measured; the functions measure, each in a
fraction of a second.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from experts.dispatch import SocketExchange
from experts.safetensors_io import fresh, fresh_bytes
from kernels.cpu import NativeKernels, choose_kernel
from kernels.cpu.compiler import BuildError
from kernels.cpu.limits import read_speed
from kernels.planes import PREFIX_BITS, PlaneLayout, QuantizedExperts, num_planes
from moe.cache_dir.files import hardware
from moe.cache_dir.trials import Trials
from moe.commands.plan.decode_speed import Bandwidths
from moe.errors import ProfileError
from offload.readers import choose_reader, sample_places
from offload.transfer import Read

SAMPLE_BYTES = 256 << 20
"""Larger than any CPU cache."""
CACHE_SAMPLE_BYTES = 64 << 20
LAYER_S, ROW_S = 15e-6, 20e-6
"""Seconds of a decode step's layer beside its weights, and of each token in it, by two cores of a
Zen 5: docs/results/2026-11-25-decode.md."""
STOP_S = 400e-6
"""Seconds in which the disk rests at a layer that lacks experts: Python chooses slots and begins
the reads, and behind them sleeping threads wake. .2 to .9 ms by two cores of a Zen 5:
docs/results/2026-11-26-plan.md."""
HIDDEN, WIDTH, CHOSEN = 1024, 512, 8
"""Sizes of the experts that weights are read from, and the number that a layer reads."""
PAGE = 4096
IN_FLIGHT = 8
MEASURE_S = 0.3
ROUNDS = 20
LARGE_BYTES = 4 << 20
TIMEOUT_S = 20.0

T = TypeVar("T")


class MachineSpeeds:
    """Bandwidths of this machine, measured today or now.

    Args:
        device: of the model.
        keep: False measures each time, and keeps nothing.

    Attributes:
        since: the minute of the oldest figure; empty if all were measured now.
    """

    def __init__(self, device: torch.device, keep: bool) -> None:
        self.device, self.since = device, ""
        self._trials = Trials(keep)

    def memory(self) -> float:
        """See `memory_speed`."""
        return self._recall("memory", [], float, partial(memory_speed, self.device))

    def steps(self, bits: float, disk: DiskSpeed | None = None) -> Bandwidths:
        """Return the speed at which decode steps go through weights in the device's memory, which
        have so many bits, and on the disk.

        On a CPU with compiled kernels, bit planes are read as a step does: a token's experts of a
        layer, then those of the next. Whole weights are read as fast as memory goes.
        """
        found = Bandwidths(0.0)
        if disk is not None:
            found = replace(found, disk=disk.bytes_per_s, read_s=STOP_S + disk.latency_s)
        native = choose_kernel()[0] if self.device.type == "cpu" else None
        if native is None:
            return replace(found, memory=self.memory())
        return replace(found, memory=self._weights(native, bits), layer_s=LAYER_S, row_s=ROW_S)

    def products(self) -> float:
        """See `product_speed`."""
        return self._recall("products", [], float, partial(product_speed, self.device))

    def to_device(self) -> float | None:
        """See `to_device_speed`; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return self._recall("to device", [], float, partial(to_device_speed, self.device))

    def disk(self, file: Path, block_bytes: int, reader: str = "auto") -> DiskSpeed:
        """See `disk_speed`."""
        about, measure = [block_bytes, reader], partial(disk_speed, file, block_bytes, reader)
        return self._recall("disk", about, DiskSpeed, measure, file)

    def cache_disk(self, folder: Path, block_bytes: int, reader: str = "auto") -> DiskSpeed:
        """See `cache_speed`."""
        folder.mkdir(parents=True, exist_ok=True)
        about, measure = [block_bytes, reader], partial(cache_speed, folder, block_bytes, reader)
        return self._recall("disk", about, DiskSpeed, measure, folder)

    def link(self) -> Link:
        """See `measure_link`."""
        return self._recall("link", [], Link, measure_link)

    def _weights(self, native: NativeKernels, bits: float) -> float:
        if bits >= 16:
            return self.memory()
        planes = num_planes(max(own for own in PREFIX_BITS if own <= max(bits, 2)))
        return self._recall("planes", planes, float, partial(_experts_speed, native, planes))

    def _recall(
        self,
        name: str,
        about: object,
        kind: type[T],
        measure: Callable[[], T],
        place: Path | None = None,
    ) -> T:
        found = self._trials.recall(name, [about, hardware(self.device)], kind, measure, place)
        self.since = min(filter(None, (self.since, found.since)), default="")
        return found.value


class DiskSpeed(NamedTuple):
    """The speed of a reader: ``n`` reads of b bytes that begin together take ``latency_s + n b /
    bytes_per_s``.

    Attributes:
        reader: its name.
    """

    bytes_per_s: float
    latency_s: float
    reader: str


def memory_speed(device: torch.device) -> float:
    """Bytes per second at which the device reads its memory: on a CPU as the best of our loops do,
    on a GPU and without compiled kernels as `torch.sum` does."""
    if device.type == "cpu":
        with suppress(BuildError):
            return read_speed()
    array = torch.ones(SAMPLE_BYTES // 4, dtype=torch.float32, device=device)
    return SAMPLE_BYTES / _best_of(5, lambda: array.sum().item())


def _experts_speed(native: NativeKernels, planes: int) -> float:
    """Bytes per second of calls with `CHOSEN` experts each, of `SAMPLE_BYTES` together."""
    first, second = PlaneLayout(WIDTH, HIDDEN), PlaneLayout(HIDDEN, WIDTH)
    blobs = [2 * first.plane_bytes(plane) + second.plane_bytes(plane) for plane in range(planes)]
    scales = 2 * first.num_scales + second.num_scales
    nbytes = sum(blobs) + 2 * scales
    calls = -(-SAMPLE_BYTES // (nbytes * CHOSEN))
    count = calls * CHOSEN
    planes_E = [fresh_bytes(count * size).fill_(0x5A).view(count, size) for size in blobs]
    scales_E = fresh([count, scales], first.scale_dtype).fill_(0.01)
    experts = QuantizedExperts(
        first, 2, second, tuple(zip(*planes_E, strict=True)), tuple(scales_E), _swiglu
    )
    row, weights = torch.ones(1, HIDDEN), torch.full((1, CHOSEN), 1 / CHOSEN)
    ids = torch.randperm(count).view(calls, 1, CHOSEN)

    def layers() -> None:
        for chosen in ids:
            native.planes.experts(row, chosen, weights, experts)

    return count * nbytes / _best_of(5, layers)


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return silu(gate) * up


def product_speed(device: torch.device) -> float:
    """FLOP per second of a large product of matrices: float32 on a CPU, bf16 on a GPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = 512 if device.type == "cpu" else 8192
    left, right = torch.ones(2, rows, rows, dtype=dtype, device=device)
    return 2 * rows**3 / _best_of(5, lambda: (left @ right)[0, 0].item())


def to_device_speed(device: torch.device) -> float:
    """Bytes per second from pinned host memory to a CUDA device."""
    source = torch.ones(SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return SAMPLE_BYTES / _best_of(3, copy)


def cache_speed(folder: Path, block_bytes: int, reader: str = "auto") -> DiskSpeed:
    """`disk_speed` of a directory's disk, by a file that is written there and removed again."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="moe-plan-") as file:
        block = random.randbytes(1 << 20)
        for _ in range(max(block_bytes * IN_FLIGHT, CACHE_SAMPLE_BYTES) >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return disk_speed(Path(file.name), block_bytes, reader)


def disk_speed(file: Path, block_bytes: int, reader: str = "auto") -> DiskSpeed:
    """Measure random reads past the page cache, one and `IN_FLIGHT` at a time.

    Args:
        file: a large file on the disk to measure.
        block_bytes: of one read; rounded to pages.
        reader: see `offload.readers.choose_reader`.

    Raises:
        OffloadError: the file cannot be read.
    """
    block = max(block_bytes // PAGE, 1) * PAGE
    count = max(file.stat().st_size // block, 1)
    block = min(block, file.stat().st_size)
    places = sample_places(IN_FLIGHT, block)
    chosen = choose_reader(file, reader)
    fd = os.open(file, os.O_RDONLY)

    def seconds(reads: int) -> float:
        start = time.perf_counter()
        transfers = [
            chosen.submit([Read(fd, file, random.randrange(count) * block, place)], urgent=True)
            for place in places[:reads]
        ]
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - start

    try:
        start, times = time.perf_counter(), list[tuple[float, float]]()
        while not times or time.perf_counter() - start < MEASURE_S:
            times.append((seconds(1), seconds(IN_FLIGHT)))
    finally:
        chosen.close()
        os.close(fd)
    one, many = (median(each) for each in zip(*times, strict=True))
    rest = max((many - one) / (IN_FLIGHT - 1), many / IN_FLIGHT / 2)  # noise must not be speed
    return DiskSpeed(block / rest, max(one - rest, 0.0), chosen.name)


def _best_of(rounds: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after a warm-up."""
    run()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Link:
    """The connection between ranks.

    Attributes:
        bytes_per_s: bandwidth of one rank that sends and receives at the same time.
        seconds: latency of an exchange.
        how: measured or given.
    """

    bytes_per_s: float
    seconds: float
    how: str

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.2f} GB/s a rank, {self.seconds * 1e6:.0f} µs ({self.how})"


def given_link(text: str, option: str) -> Link:
    """Parse ``GB/s,microseconds``. Raises `ProfileError` if the text is something else."""
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
    """Measure the link between two ranks on this machine, with a thread for each."""
    ends = socket.socketpair()

    def run(rank: int) -> list[float]:
        exchange, best = SocketExchange(rank, {1 - rank: ends[rank]}, TIMEOUT_S), []
        for size in (1, LARGE_BYTES):
            sent, received = torch.ones(2, 1, size, dtype=torch.uint8)
            rows_R = [int(other != rank) for other in range(2)]
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                exchange.all_to_all(sent, received, rows_R, rows_R)()
                times.append(time.perf_counter() - start)
            best.append(min(times))
        exchange.close()
        return best

    with ThreadPoolExecutor(2) as threads:
        small, large = next(threads.map(run, range(2)))
    return Link(LARGE_BYTES / max(large - small, 1e-9), small, "measured here, local sockets")
