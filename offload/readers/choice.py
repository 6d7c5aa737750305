"""Which reader for these files: those that pass by the page cache are tried, the fastest is taken.

Reads through the page cache are for file systems that know nothing else: they take memory that no
plan has counted, and time of the processor that computes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.cpu import choose_kernel
from offload.errors import OffloadError
from offload.readers.deepspeed import DeepSpeedReads, load_deepspeed
from offload.readers.direct_io import Buffered, Direct, DirectFiles, Way
from offload.readers.native import NativeReader
from offload.readers.threads import THREADS, ThreadedReader
from offload.transfer import Read, Reader

MEASURE_S = 0.08
"""For each reader."""
SAMPLE_BYTES = 256 << 10
BATCH = 8

KINDS = {
    "direct": "threads with O_DIRECT",
    "deepspeed": "DeepSpeed's asynchronous reads",
    "buffered": "threads through the page cache",
}


def choose_reader(file: Path, kind: str = "auto") -> Reader:
    """The reader that reads this file fastest; the caller closes it.

    Args:
        file: one of those that will be read.
        kind: ``auto``, or which one to take: ``direct``, ``deepspeed`` or ``buffered``.

    Raises:
        OffloadError: the file cannot be read, or the reader asked for is not to be had.
    """
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise OffloadError(f"cannot read {file}: {error.strerror}") from error
    readers: list[Reader] = []
    try:
        ways, notes = _ways(kind, fd)
        if not ways:
            raise OffloadError(f"the reader {kind!r} is not to be had: {notes}; use 'auto'")
        for name, make in ways.items():
            readers.append(_open(name, make))
        _measure(readers, fd, file)
        readers.sort(key=lambda reader: -reader.bytes_per_second)  # stable: the preferred one first
        figures = [f"{r.name} {r.bytes_per_second / 1e9:.2f} GB/s" for r in readers]
        readers[0].reason = "; ".join(filter(None, (", ".join(figures), notes)))
        return readers.pop(0)
    finally:
        for reader in readers:
            reader.close()
        os.close(fd)


def _open(name: str, make: Callable[[DirectFiles], Way]) -> Reader:
    """A reader by a way, compiled where there is one."""
    files, native = DirectFiles(), choose_kernel()[0]
    if name == "direct" and native is not None:
        return NativeReader(KINDS[name], native, files)
    reader = ThreadedReader(KINDS[name], partial(make, files))
    reader.on_close(files.close)
    return reader


def _ways(kind: str, fd: int) -> tuple[dict[str, Callable[[DirectFiles], Way]], str]:
    """What is there of what is wanted, the one to prefer first, and why the rest is not."""
    probe = DirectFiles()
    has_direct = probe.get(fd) is not None
    probe.close()
    if not has_direct or kind == "buffered":
        note = "" if has_direct else "this file system has no O_DIRECT"
        return ({"buffered": lambda _: Buffered()} if kind in ("auto", "buffered") else {}), note
    ways: dict[str, Callable[[DirectFiles], Way]] = {"direct": Direct}
    module, why = _deepspeed(kind)
    if module is not None:
        ways["deepspeed"] = partial(DeepSpeedReads, module)
    return {name: way for name, way in ways.items() if kind in ("auto", name)}, why


def _deepspeed(kind: str) -> tuple[Any, str]:
    return (None, "") if kind == "direct" else load_deepspeed(THREADS, build=kind == "deepspeed")


def _measure(readers: list[Reader], fd: int, file: Path) -> None:
    samples = os.fstat(fd).st_size // SAMPLE_BYTES
    order = random.sample(range(samples), min(samples, 4096))
    for index, reader in enumerate(readers):
        own = order[index :: len(readers)]  # what one has read, another must not find in a cache
        reader.bytes_per_second = _bytes_per_second(reader, fd, file, own)


def _bytes_per_second(reader: Reader, fd: int, file: Path, samples: list[int]) -> float:
    places = [torch.empty(SAMPLE_BYTES + 4096, dtype=torch.uint8) for _ in range(BATCH)]
    aligned: list[Any] = [place[-place.data_ptr() % 4096 :][:SAMPLE_BYTES] for place in places]
    start, done = time.perf_counter(), 0
    while samples and time.perf_counter() - start < MEASURE_S:
        batch, samples = samples[:BATCH], samples[BATCH:]
        offsets = [sample * SAMPLE_BYTES for sample in batch]
        for offset in offsets:  # the disk is measured, not what memory happens to hold of the file
            os.posix_fadvise(fd, offset, SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
        transfers = [
            reader.submit([Read(fd, file, offset, place)], urgent=True)
            for offset, place in zip(offsets, aligned, strict=False)
        ]
        for transfer in transfers:
            transfer.wait()
        done += len(batch) * SAMPLE_BYTES
    return done / (time.perf_counter() - start)
