"""What ranks that share the experts of a model gain, send and lose: measured with real processes.

    python -m benchmarks.expert_parallel [--quick] [--ranks 1 2 4] [--model 2b|demo|STORE]

Every launch is a fresh set of processes over gloo, one thread a rank where there are several, and
all cores for one rank. Launches take turns, every second round backwards. Tokens a second are of
decode steps. "kB a token" are rows that ranks sent each other (there and back, all layers), beside
the least that could be: each distinct (token, other rank) pair's row once there and once back; ids
and sizes come on top. Overlap is as the profile has it (auto) unless a point says on or off. The
cache limit leaves a quarter of all experts in each rank's memory.

Imbalance is the heaviest rank's tokens over the mean, of the shipped model's texts and of Zipf's
law, placed linearly, by EPLB and by ours; see `benchmarks.placement`. The last line is one JSON
object; `benchmarks.simulate --against FILE` compares it with what the simulator says.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.offload_models import Target, targets
from benchmarks.placement import ROOT, TEXTS, judge, text_trace, zipf_trace
from benchmarks.rank_launch import LaunchError, measure
from experts.manifest import read_manifest
from moe import MoE
from moe.loading.hub import TOP_K, read_config

REPLICAS = 0.25
LIMIT = 0.25
"""Share of all experts in a rank's memory where that is limited."""


@dataclass
class Point:
    """One way of running, and what its launches found."""

    name: str
    ranks: int
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def figures(self, layers: int) -> dict[str, Any]:
        """Median speed, and what was sent for a token by the last run."""
        if not self.runs:
            return {"name": self.name, "ranks": self.ranks, "error": self.error}
        rates = [run["tokens_per_s"] for run in self.runs]
        found = {"name": self.name, "ranks": self.ranks, "tokens_per_s": median(rates)}
        found["runs_tokens_per_s"] = rates
        ranks = self.runs[-1]["ranks"]
        if ranks:
            tokens = sum(rank["tokens"] for rank in ranks) / layers
            for key in ("bytes_out", "bytes_back", "lower_bound_bytes", "meta_bytes"):
                found[f"{key}_a_token"] = sum(rank[key] for rank in ranks) / tokens
            served = [rank["served"] for rank in ranks]
            found["imbalance"] = max(served) * len(served) / sum(served)
            found["exchange_seconds"] = max(rank["seconds"] for rank in ranks)
        return found


def points(target: Target, counts: Sequence[int], prompt: int, *, quick: bool) -> list[Point]:
    """All ways of running."""
    free = target.settings(1, prompt)
    limited = target.settings(LIMIT, prompt)
    found = []
    for ranks in counts:
        threads = {"threads": os.cpu_count() if ranks == 1 else 1}
        name = f"{ranks} ranks" if ranks > 1 else "1 rank"
        found.append(Point(name, ranks, threads | free))
        if ranks > 1:
            summed = {"parallel.combine": "summed"}
            found.append(Point(f"{name}, summed", ranks, threads | free | summed))
        if ranks > 1 and not quick:
            for overlap in ("on", "off"):
                how = {"parallel.overlap": overlap}
                found.append(Point(f"{name}, overlap {overlap}", ranks, threads | free | how))
        if not quick:
            found.append(Point(f"{name}, 25 % of experts each", ranks, threads | limited))
    return found


def run(found: Sequence[Point], target: Target, job: dict[str, Any], rounds: int) -> None:
    """Launch every point, in turns."""
    order = list(found)
    for _ in range(rounds):
        for point in order:
            if not point.error:
                try:
                    point.runs.append(measure(target.store, point.ranks, point.settings, job))
                except LaunchError as error:
                    point.error = str(error)
                    print(f"{point.name}: {error}")
        order.reverse()


def imbalances(counts: Sequence[int], *, quick: bool) -> list[dict[str, Any]]:
    """Of texts and of Zipf's law, with a quarter of copies."""
    steps = 12 if quick else 96
    traces = {f"zipf {exponent}": zipf_trace(exponent, 512, steps) for exponent in (0.5, 1.0)}
    model = MoE.from_pretrained(ROOT / "examples/demo-model")
    for name in TEXTS[1:2] if quick else TEXTS:
        text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()
        traces[name] = text_trace(model, text, 512, steps)
    return [
        {"trace": name, "ranks": ranks} | judge(trace, ranks, int(trace.shape[2] * (1 + REPLICAS)))
        for name, trace in traces.items()
        for ranks in counts
        if ranks > 1
    ]


def shape(target: Target) -> dict[str, Any]:
    """What the simulator must know of a store."""
    manifest, config = read_manifest(target.store), read_config(target.store).get_text_config()
    return {
        "layers": len(manifest.layers),
        "experts": manifest.layers[0].experts,
        "top_k": next(getattr(config, name) for name in TOP_K if hasattr(config, name)),
        "hidden": config.hidden_size,
        "expert_bytes": target.expert_bytes,
    }


def show(figures: Sequence[dict[str, Any]], uneven: Sequence[dict[str, Any]]) -> None:
    """Two tables."""
    base = next((f["tokens_per_s"] for f in figures if f["ranks"] == 1 and "error" not in f), None)
    rows = []
    for one in figures:
        if "error" in one:
            rows.append((one["name"], "failed", *[""] * 5))
            continue
        sent = one.get("bytes_out_a_token", 0.0) + one.get("bytes_back_a_token", 0.0)
        rows.append(
            (
                one["name"],
                f"{one['tokens_per_s']:,.1f}",
                "" if base is None else f"{one['tokens_per_s'] / base:.2f}",
                f"{sent / 1e3:,.1f}",
                f"{one.get('lower_bound_bytes_a_token', 0.0) / 1e3:,.1f}",
                f"{one.get('meta_bytes_a_token', 0.0) / 1e3:,.1f}",
                f"{one.get('imbalance', 1.0):.3f}",
            )
        )
    columns = ("", "tokens/s", "of 1 rank", "kB a token", "at least", "ids, sizes", "imbalance")
    print_table("decode", columns, rows)
    print_table(
        "heaviest rank over the mean, 512 tokens a step, a quarter of copies",
        ("trace", "ranks", "linear", "EPLB", "ours"),
        [(one["trace"], str(one["ranks"]), *(f"{one[way]:.3f}" for way in WAYS)) for one in uneven],
    )


WAYS = ("linear", "eplb", "ours")


def main() -> None:
    options = _parser().parse_args()
    name = options.model or ("demo" if options.quick else "2b")
    target = next(targets([name]), None)
    if target is None:
        raise SystemExit("the model cannot be made here; take --model demo")
    counts = options.ranks or ([1, 2] if options.quick else [1, 2, 4])
    job = {"batch": options.batch, "prompt": options.prompt}
    job |= {"steps": 16, "rounds": 1} if options.quick else {"steps": options.steps, "rounds": 3}
    print_header(environment() | {"model": target.store.name} | job)
    found = points(target, counts, options.prompt * options.batch, quick=options.quick)
    run(found, target, job, 1 if options.quick else options.rounds)
    made = shape(target)
    figures = [point.figures(made["layers"]) for point in found]
    uneven = imbalances(counts, quick=options.quick)
    show(figures, uneven)
    print_json(
        {"points": figures, "imbalance": uneven, "model": made, "job": job}
        | {"weight_bytes": next((p.runs[-1]["weight_bytes"] for p in found if p.runs), 0)}
        | {"environment": environment()}
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure several ranks that share the experts.")
    add = parser.add_argument
    add("--quick", action="store_true", help="the shipped model, few steps, no cache limits")
    add("--ranks", type=int, nargs="+", help="one or several numbers (default: 1 2 4)")
    add("--model", help="2b, demo or a store (default: 2b)")
    add("--batch", type=int, default=16, help="sequences (%(default)s)")
    add("--prompt", type=int, default=32, help="tokens of a prompt (%(default)s)")
    add("--steps", type=int, default=32, help="decode steps (%(default)s)")
    add("--rounds", type=int, default=2, help="launches of each (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
