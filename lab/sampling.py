"""What does a drawn token cost in main memory: row by row, or by the arithmetic of devices?

Both draw the same tokens from logits whose peaks fall as a model's do, in turns.

    OMP_NUM_THREADS=1 python -m lab.sampling [--vocabulary 4096 151936]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import environment, print_json, print_table
from moe.sampling import host
from moe.sampling.batch import Row, draw_batch
from moe.sampling.params import SamplingParams

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-p .95": {"top_p": 0.95},
    "top-k 20, top-p .95": {"top_k": 20, "top_p": 0.95},
    "min-p .05": {"min_p": 0.05},
}


def logits_of(rows: int, vocabulary: int) -> Tensor:
    """Of Zipf's law, shuffled."""
    draw = torch.Generator().manual_seed(0)
    falling = -1.2 * torch.arange(1, vocabulary + 1).log()
    return torch.stack([falling[torch.randperm(vocabulary, generator=draw)] for _ in range(rows)])


def microseconds(run: Callable[[], object], times: int) -> float:
    """The median."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(1e6 * (time.perf_counter() - start))
    return median(found[times // 5 :])


def measure(vocabulary: int, rows: int, times: int) -> list[dict[str, Any]]:
    """Microseconds a row, both ways."""
    found, logits_BV = [], logits_of(rows, vocabulary)
    for name, filters in FILTERS.items():
        params = SamplingParams(temperature=0.8, **filters)
        given = [Row(params, (at + 0.5) / rows) for at in range(rows)]

        def run(given: Sequence[Row] = given) -> object:
            return draw_batch([logits_BV], given)

        ours = microseconds(run, times) / rows
        with patch.object(host, "on_host", lambda _: False):
            theirs = microseconds(run, times) / rows
        where = {"vocabulary": vocabulary, "rows": rows, "filter": name}
        found.append({**where, "host": ours, "device": theirs, "ratio": theirs / ours})
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--times", type=int, default=100)
    args = parser.parse_args()
    found = [
        own
        for vocabulary in args.vocabulary
        for rows in args.rows
        for own in measure(vocabulary, rows, args.times)
    ]
    names = ["vocabulary", "rows", "filter", "host", "device", "ratio"]
    table = [
        [f"{own[name]:.2f}" if isinstance(own[name], float) else str(own[name]) for name in names]
        for own in found
    ]
    print_table("A drawn token in microseconds", names, table)
    print_json({"environment": environment(), "results": found})


if __name__ == "__main__":
    main()
