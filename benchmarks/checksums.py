"""What comparing checksums costs a cold first read of experts from disk.

    python -m benchmarks.checksums [--rounds 12] [--folder DIR]

Writes a store of 4 layers with 64 experts of Qwen3-30B-A3B's shape at 4 bits (640 MB), and reads
all of them, 8 at a time, as a layer of the model does: all 8 reads begin, then each is waited for.
Each layer is read twice a round, with checksums compared (every expert, as in a first read) and
without, in alternating order. Prints the median ratio of their times, the ratio of the fastest
tenths, and the processor's time.
"""

from __future__ import annotations

import argparse
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
from examples.models.random_store import BITS, SHAPE, write_random_store
from experts.store import Store
from experts.weights import ExpertKey
from offload.capacity import arena_for
from offload.open_store import Biases, DiskSource
from offload.readers import choose_reader

LAYERS, EXPERTS, AT_ONCE = 4, 64, 8


def read(source: DiskSource, layer: int, compared: bool) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, of reading a layer's experts."""
    source._checked = {ExpertKey(layer, e): 0 if compared else 1 << 62 for e in range(EXPERTS)}
    source._since = -EXPERTS  # no sample of those that were compared
    start, processor = time.perf_counter(), time.process_time()
    for first in range(0, EXPERTS, AT_ONCE):
        reads = [source.fetch(layer, first + at, at, urgent=True) for at in range(AT_ONCE)]
        for each in reads:
            each.wait()
    return time.perf_counter() - start, time.process_time() - processor


def tenth(values: Iterable[float]) -> float:
    """A time that a tenth of them is under, which other work on the machine hardly changes."""
    return statistics.quantiles(values, n=10)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where the store is kept for the next run")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)) / "store"
        if not folder.exists():
            sizes: dict[str, Any] = {**SHAPE, "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
            sizes["vocab_size"] = 1024
            write_random_store(Qwen3MoeConfig(**sizes, dtype=torch.bfloat16), folder)
        with Store.open(folder) as store, closing(choose_reader(store.file(0).path)) as reader:
            like: Any = SimpleNamespace(activation=torch.nn.functional.silu, post_norm=None)
            arena = arena_for(store.manifest, BITS, AT_ONCE, like, torch.device("cpu"))
            none = [Biases(None, None)] * LAYERS
            source = DiskSource(store, BITS, reader, arena, none)
            size = sum(place.nbytes for place in arena.places(0)) * EXPERTS
            times = []
            for number in range(options.rounds * LAYERS):
                order = (True, False) if number % 2 else (False, True)
                taken = {how: read(source, number % LAYERS, how) for how in order}
                times.append((*taken[True], *taken[False]))
    figures = {
        "reader": reader.name,
        "gb_per_second_without": size / statistics.median(t[2] for t in times) / 1e9,
        "time_ratio": statistics.median(t[0] / t[2] for t in times),
        "time_ratio_of_fastest": tenth(t[0] for t in times) / tenth(t[2] for t in times),
        "processor_ms_per_gb": statistics.median(t[1] - t[3] for t in times) / size * 1e12,
        "pairs": len(times),
    }
    print_table("checksums", ["figure", "value"], list(figures.items()))
    print_json({**facts, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
