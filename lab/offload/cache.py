"""How much of what is asked for is there? Policies on real routings.

    python -m lab.offload.cache [--quick] [--others COUNT]

The shipped model reads held-out text of each domain, and of all in turn (with ``--others``, so many
other texts of each domain); its routings are replayed at capacities of 6.25, 12.5, 25 and 50 % of
the experts and batches of 1, 4 and 16 (sequences that decode together, one token each a step). A
hit is an expert that is there when its layer asks for it; nothing is prefetched here, so a miss is
an expert read. `gap` is the share closed of the way from LRU to Belady, who knows the future.
`foresees N` knows the next N visits of every layer without fault, and beyond them how often each
expert is asked for: more than any predictor can.
`lru_per_layer` gives each layer an equal share of the slots instead of one pool. Policies know
only what they have seen in the trace, of which nothing at its beginning. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, print_header, print_json, print_table
from lab.offload.traces import Recorded, other_recordings, recordings
from moe import MoE
from offload.policies import LRU, POLICIES, FrequencyRecency
from offload.replay import hit_ratio
from tests.oracles.replay_bounds import RandomChoice, belady

MODEL = Path(__file__).parents[2] / "examples/demo-model"
CAPACITIES = (0.0625, 0.125, 0.25, 0.5)
BATCHES = (1, 4, 16)
DEFAULT = "forecast"
FORESEEN = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short traces")
    parser.add_argument(
        "--others", type=int, default=0, help="texts of each domain to read instead"
    )
    options = parser.parse_args()
    model = MoE.from_pretrained(str(MODEL))
    print_header(environment())
    results = []
    tokens = 512 if options.quick else 4096
    read = recordings(model, tokens)
    if options.others:
        read = other_recordings(model, tokens, options.others)
    for recorded in read:
        for batch in BATCHES:
            results += replay(recorded, batch)
        show(recorded.name, [row for row in results if row["trace"] == recorded.name])
    own = summary(DEFAULT, results)
    print_json({**environment(), "results": results, "default_policy": DEFAULT, **own})


def summary(policy: str, results: list[dict[str, Any]]) -> dict[str, float]:
    """Of a policy, against the better of LRU and LFU, and Belady."""
    own = [row for row in results if row["policy"] == policy]
    above = [row["hit_ratio"] - best_simple(row, results) for row in own]
    at_one = [row for row in own if row["batch"] == 1 and row["capacity"] >= 0.25]
    return {
        "least_gap_closed_at_batch_1": min(row["gap"] for row in at_one),
        "mean_gap_closed_at_batch_1": sum(row["gap"] for row in at_one) / len(at_one),
        "mean_gap_closed": sum(row["gap"] for row in own) / len(own),
        "points": len(own),
        "below_lru_or_lfu": sum(difference < 0 for difference in above),
        "least_above_lru_or_lfu": min(above),
    }


def replay(recorded: Recorded, batch: int) -> list[dict[str, Any]]:
    """Of every capacity and policy."""
    layers, width = recorded.num_layers, recorded.width
    calls = recorded.calls(batch)
    rows = []
    for capacity in CAPACITIES:
        slots = int(capacity * sum(recorded.trace.num_experts))
        found = {
            "random": hit_ratio(calls, slots, RandomChoice(layers, width), width),
            "lru_per_layer": per_layer(calls, slots, layers, width),
        }
        for name, make in POLICIES.items():
            found[name] = hit_ratio(calls, slots, make(layers, width), width)
        for visits in FORESEEN:
            usual = FrequencyRecency(layers, width)
            found[f"foresees {visits}"] = belady(calls, slots, visits * layers, usual, width)
        best = found["belady"] = belady(calls, slots)
        where = {"trace": recorded.name, "batch": batch, "capacity": capacity}
        rows += [
            {
                **where,
                "policy": name,
                "hit_ratio": round(ratio, 4),
                "gap": round((ratio - found["lru"]) / (best - found["lru"]), 3),
            }
            for name, ratio in found.items()
        ]
    return rows


def per_layer(calls: list[list[int]], slots: int, layers: int, width: int) -> float:
    """LRU in a share of the slots for each layer."""
    hits = asked = 0.0
    for layer in range(layers):
        own = calls[layer::layers]
        size = sum(map(len, own))
        hits += size * hit_ratio(own, slots // layers, LRU(layers, width), width)
        asked += size
    return hits / asked


def best_simple(row: dict[str, Any], results: list[dict[str, Any]]) -> float:
    """The better of LRU and LFU in the same place."""
    return max(other["hit_ratio"] for other in same_place(row, results, ("lru", "lfu")))


def same_place(
    row: dict[str, Any], results: list[dict[str, Any]], names: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    place = ("trace", "batch", "capacity")
    for other in results:
        if other["policy"] in names and all(other[key] == row[key] for key in place):
            yield other


def show(name: str, rows: list[dict[str, Any]]) -> None:
    columns = [(batch, capacity) for batch in BATCHES for capacity in CAPACITIES]
    by_place = {(row["policy"], row["batch"], row["capacity"]): row for row in rows}
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [by_place.get((policy, *column)) for column in columns]
        lines.append(
            [policy, *(f"{c['hit_ratio']:.3f} {c['gap']:+.2f}" if c else "" for c in cells)]
        )
    heads = [f"{batch} x {capacity:.1%}" for batch, capacity in columns]
    print_table(f"{name}: hit ratio and gap closed", ["batch x capacity", *heads], lines)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
