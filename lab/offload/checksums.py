"""What comparing checksums costs a cold first read of experts from disk, and a run that reads them.

    python -m lab.offload.checksums [--rounds 12] [--folder DIR]
    python -m lab.offload.checksums --decode

Writes a store of 4 layers with 64 experts of Qwen3-30B-A3B's shape at 4 bits (640 MB), and reads
all of them, 8 at a time, as a layer of the model does: all 8 reads begin, then each is waited for.
Each layer is read in each way once a round, in turns: with checksums compared (every expert, as in
a first read), without, and without but with as many checksums of other bytes, which lie elsewhere
in main memory, or in a cache: that tells apart what arithmetic costs and what memory does. Prints
median ratios to the times without, the ratio of the fastest tenths, and the processor's time.

``--decode`` decodes random tokens with half of the experts in memory, in turns with every expert
compared at each read, and with none. (A run compares each at its first read, and one of 64 later.)
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3MoeConfig

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.decode_contenders import Ours
from examples.models.random_store import BITS, SHAPE, write_random_store
from experts.store import Store
from experts.weights import ExpertKey
from kernels.cpu.checksum import crc32
from offload.capacity import arena_for
from offload.open_store import Biases, DiskSource
from offload.readers import choose_reader

LAYERS, EXPERTS, AT_ONCE, TOKENS = 4, 64, 8, 24


_ELSEWHERE = torch.zeros(64 << 20, dtype=torch.uint8)
_CACHED = 256 << 10
WAYS = ("compared", "without", "elsewhere", "cached")


def read(source: DiskSource, layer: int, way: str) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, of reading a layer's experts."""
    known = 0 if way == "compared" else 1 << 62
    source._checked = {ExpertKey(layer, expert): known for expert in range(EXPERTS)}
    source._since = -EXPERTS  # no sample of those that were compared
    size = sum(place.nbytes for place in source._arena.places(0))
    start, processor = time.perf_counter(), time.process_time()
    for first in range(0, EXPERTS, AT_ONCE):
        reads = [source.fetch(layer, first + at, at, urgent=True) for at in range(AT_ONCE)]
        for at, each in enumerate(reads):
            each.wait()
            if way == "elsewhere":
                crc32(_ELSEWHERE.data_ptr() + at * size, size)
            elif way == "cached":
                for _ in range(size // _CACHED):
                    crc32(_ELSEWHERE.data_ptr(), _CACHED)
    return time.perf_counter() - start, time.process_time() - processor


class _Unknown(dict[ExpertKey, int]):
    """What has been compared: nothing, if every read shall be; else all."""

    every = False

    def get(self, key: ExpertKey, default: Any = None) -> Any:
        return 0 if self.every else 1 << 62


def decode(folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second, with every read compared and with none."""
    ours = Ours(folder, None, memory={"device_gib": 0.45}, prefill={"wave_tokens": 256})
    offloaded: Any = ours.model._loaded.offloaded
    source, draw = offloaded.cache._manager._source, random.Random(0)
    known = source._checked = _Unknown()
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 8):
        for every in (True, False) if number % 2 else (False, True):
            known.every, source._since = every, -1_000_000
            seconds = sum(ours.decode([[1]], [[draw.randrange(1000) for _ in range(TOKENS)]]))
            if number >= 8:  # a processor wakes up
                times[every].append(seconds)
    return {
        "tokens_per_second_compared": TOKENS / statistics.median(times[True]),
        "tokens_per_second_without": TOKENS / statistics.median(times[False]),
        "time_ratio": statistics.median(a / b for a, b in zip(*times.values(), strict=True)),
        "hit_ratio": ours.model.stats()["offload"]["hit_ratio"],
        "pairs": rounds,
    }


def tenth(values: Iterable[float]) -> float:
    """A time that a tenth of them is under, which other work on the machine hardly changes."""
    return statistics.quantiles(values, n=10)[0]


def reads(folder: Path, rounds: int) -> dict[str, Any]:
    """Ratios of the times of reading all experts in each way."""
    with Store.open(folder) as store, closing(choose_reader(store.file(0).path)) as reader:
        like: Any = SimpleNamespace(activation=torch.nn.functional.silu, post_norm=None)
        arena = arena_for(store.manifest, BITS, AT_ONCE, like, torch.device("cpu"))
        none = [Biases(None, None)] * LAYERS
        source = DiskSource(store, BITS, reader, arena, none)
        size = sum(place.nbytes for place in arena.places(0)) * EXPERTS
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(rounds * LAYERS):
            for at in range(len(WAYS)):
                way = WAYS[(number + at) % len(WAYS)]
                times[way].append(read(source, number % LAYERS, way))

    def ratio(way: str) -> float:
        pairs = zip(times[way], times["without"], strict=True)
        return statistics.median(own[0] / without[0] for own, without in pairs)

    fastest = {way: tenth(own[0] for own in times[way]) for way in WAYS}
    processor = {way: statistics.median(own[1] for own in times[way]) for way in WAYS}
    return {
        "reader": reader.name,
        "gb_per_second_without": size / statistics.median(own[0] for own in times["without"]) / 1e9,
        "time_ratio": ratio("compared"),
        "time_ratio_of_fastest": fastest["compared"] / fastest["without"],
        "time_ratio_elsewhere": ratio("elsewhere"),
        "time_ratio_cached": ratio("cached"),
        "processor_ms_per_gb": (processor["compared"] - processor["without"]) / size * 1e12,
        "rounds": len(times["without"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where the store is kept for the next run")
    parser.add_argument("--decode", action="store_true")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)) / "store"
        if not folder.exists():
            sizes: dict[str, Any] = {**SHAPE, "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
            sizes["vocab_size"] = 1024
            write_random_store(Qwen3MoeConfig(**sizes, dtype=torch.bfloat16), folder)
        figures = (decode if options.decode else reads)(folder, options.rounds)
    print_table("checksums", ["figure", "value"], list(figures.items()))
    print_json({**facts, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
