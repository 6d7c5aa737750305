"""Choose a file's reader: try those that bypass the page cache, and take the fastest.

The page cache takes memory that no plan has counted and CPU time that inference needs, so readers
that go through it serve only file systems without O_DIRECT.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from torch import Tensor

from experts.safetensors_io import fresh_bytes
from kernels.cpu import choose_kernel
from offload.errors import OffloadError
from offload.readers.deepspeed import DeepSpeedReads, load_deepspeed
from offload.readers.direct_io import BufferedReads, DirectFiles, DirectReads, ReadBackend
from offload.readers.native import NativeReader
from offload.readers.threads import THREADS, ThreadedReader
from offload.transfer import Read, Reader
from offload.trials import SpeedTrial, try_now

MEASURE_S = 0.08
"""For each reader."""
SAMPLE_BYTES, HUGE_PAGE = 256 << 10, 2 << 20
BATCH, MOST_SAMPLES = 8, 4096

KINDS = {
    "direct": "threads with O_DIRECT",
    "deepspeed": "DeepSpeed's asynchronous reads",
    "buffered": "threads through the page cache",
}

_MakeBackend = Callable[[DirectFiles], ReadBackend]


def choose_reader(file: Path, kind: str = "auto", trial: SpeedTrial = try_now) -> Reader:
    """The reader that reads this file fastest; the caller closes it.

    Args:
        file: one of those that will be read.
        kind: ``auto``, or the one to take: ``direct``, ``deepspeed`` or ``buffered``.
        trial: tries the readers, or knows how fast they were.

    Raises:
        OffloadError: the file cannot be read, or the requested reader is not available.
    """
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise OffloadError(f"cannot read {file}: {error.strerror}") from error
    try:
        backends, notes = _available(kind, fd)
        if not backends:
            raise OffloadError(f"the reader {kind!r} is not available: {notes}; use 'auto'")
        count = os.fstat(fd).st_size // SAMPLE_BYTES
        about = [sorted(backends), min(count, MOST_SAMPLES)]  # a short file tells less of a disk
        speeds, since = trial("readers", about, partial(_speeds, backends, fd, file, count), file)
    finally:
        os.close(fd)
    order = sorted(backends, key=lambda name: -speeds[name])  # stable: the preferred one first
    figures = ", ".join(f"{KINDS[name]} {speeds[name] / 1e9:.2f} GB/s" for name in order)
    when = since and f"measured on {since}"
    fastest, reason = order[0], "; ".join(filter(None, (figures, when, notes)))
    return _open(fastest, backends[fastest], reason, speeds[fastest])


def _speeds(backends: dict[str, _MakeBackend], fd: int, file: Path, count: int) -> dict[str, float]:
    """Bytes a second of each, on samples of a file that has so many."""
    samples, speeds = random.sample(range(count), min(count, MOST_SAMPLES)), {}
    for index, (name, backend) in enumerate(backends.items()):
        own = samples[index :: len(backends)]  # another's samples may be in some cache
        with closing(_open(name, backend)) as reader:
            speeds[name] = _bytes_per_second(reader, fd, file, own)
    return speeds


def _open(
    name: str, backend: _MakeBackend, reason: str = "", bytes_per_second: float = 0.0
) -> Reader:
    """A reader with this backend, compiled if possible."""
    files, native = DirectFiles(), choose_kernel()[0]
    if name == "direct" and native is not None:
        return NativeReader(KINDS[name], native, files, reason, bytes_per_second)
    make = partial(backend, files)
    return ThreadedReader(KINDS[name], make, files.close, reason, bytes_per_second)


def _available(kind: str, fd: int) -> tuple[dict[str, _MakeBackend], str]:
    """The available backends of this kind, the preferred one first; and why others are missing."""
    with closing(DirectFiles()) as probe:
        has_direct = probe.get(fd) is not None
    backends: dict[str, _MakeBackend]
    if not has_direct or kind == "buffered":
        backends = {"buffered": lambda _: BufferedReads()}
        why = "" if has_direct else "this file system has no O_DIRECT"
    else:
        backends, why = {"direct": DirectReads}, ""
        if kind != "direct":
            module, why = load_deepspeed(THREADS, build=kind == "deepspeed")
            if module is not None:
                backends["deepspeed"] = partial(DeepSpeedReads, module)
    return {name: make for name, make in backends.items() if kind in ("auto", name)}, why


def sample_places(count: int, nbytes: int) -> Tensor:
    """``(count, nbytes)`` uint8 to measure reads into, in huge pages, as a cache's slots are: into
    small ones the disk of a virtual machine reads at .6 to .9 of the speed, in each process
    another."""
    memory = fresh_bytes(count * nbytes + 2 * HUGE_PAGE).zero_()
    first = -memory.data_ptr() % HUGE_PAGE
    return memory[first : first + count * nbytes].view(count, nbytes)


def _bytes_per_second(reader: Reader, fd: int, file: Path, samples: list[int]) -> float:
    places = sample_places(BATCH, SAMPLE_BYTES)
    start, done = time.perf_counter(), 0
    while samples and time.perf_counter() - start < MEASURE_S:
        batch, samples = samples[:BATCH], samples[BATCH:]
        offsets = [sample * SAMPLE_BYTES for sample in batch]
        for offset in offsets:  # measure the disk, not the page cache
            os.posix_fadvise(fd, offset, SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
        transfers = [
            reader.submit([Read(fd, file, offset, place)], urgent=True)
            for offset, place in zip(offsets, places, strict=False)
        ]
        for transfer in transfers:
            transfer.wait()
        done += len(batch) * SAMPLE_BYTES
    return done / (time.perf_counter() - start)
