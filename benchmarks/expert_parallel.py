"""What ranks that share the experts of a model gain, send and lose: measured with real processes.

    python -m benchmarks.expert_parallel [--quick] [--ranks 1 2 4] [--model 2b|demo|STORE]

Every launch is a fresh set of processes, one thread a rank where there are several, and all cores
for one rank. Where the time is not enough for all launches (`--minutes`), those that matter less
are left out and named. Tokens a second are of decode steps. "kB a token" are rows that ranks sent
each other (there and back, all layers), beside the least that could be: each distinct (token, other
rank) pair's row once there and once back; ids and sizes come on top. `--set` adds one more way
of several ranks. The cache limit leaves a quarter of all experts in each rank's memory. "Error" is
the largest of the first tokens' log probabilities, beside one rank.

Imbalance is the heaviest rank's tokens over the mean, of the shipped model's texts and of Zipf's
law, placed linearly, by EPLB and by ours; see `benchmarks.placement`. The last line is one JSON
object; `lab.simulation --against FILE` compares it with what the simulator says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import yaml

from benchmarks.common import environment, print_header, print_json, print_table, several
from benchmarks.dispatch_cost import dispatch_seconds
from benchmarks.offload_models import Target, targets
from benchmarks.placement import ROOT, TEXTS, judge, text_trace, zipf_trace
from benchmarks.rank_points import points, run
from experts.dispatch.all_to_all import CombineMode
from moe import MoE
from moe.commands.plan.command import model_sizes
from moe.memory.planning import planning
from moe.settings.profile import load_profile

REPLICAS = 0.25
COMBINE: dict[CombineMode, str] = {"exact": "", "summed": ", summed"}
"""Ways, and what they add to the name of a run."""


def imbalances(counts: Sequence[int], *, quick: bool) -> list[dict[str, Any]]:
    """Of texts and of Zipf's law, with a quarter of copies."""
    steps = 12 if quick else 48
    traces = {f"zipf {exponent}": zipf_trace(exponent, 512, steps) for exponent in (0.5, 1.0)}
    model = MoE.from_pretrained(ROOT / "examples/demo-model")
    for name in TEXTS[1:2] if quick else TEXTS:
        text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()
        traces[name] = text_trace(model, text, 512, steps)
    return [
        {"trace": name, "ranks": ranks} | judge(trace, ranks, replicas=REPLICAS, optima=0)
        for name, trace in traces.items()
        for ranks in counts
        if ranks > 1
    ]


def shape(target: Target) -> dict[str, Any]:
    """Return what the simulator must know of a store."""
    profile = load_profile(None, {"device": "cpu"}).profile
    with planning(target.store, profile, torch.device("cpu"), lambda _: None) as planned:
        sizes, hidden = model_sizes(planned, profile), planned.config.get_text_config().hidden_size
    names = ("layers", "experts", "top_k", "expert_bytes", "trunk_bytes")
    return {name: getattr(sizes, name) for name in names} | {"hidden": hidden}


def dispatch_costs(made: dict[str, Any], counts: Sequence[int], batch: int) -> dict[str, float]:
    """Seconds that a rank computes at a layer to exchange rows, by the name of the run."""
    return {
        f"{ranks} ranks{suffix}": dispatch_seconds(made, ranks, batch, combine)
        for ranks in counts
        if ranks > 1
        for combine, suffix in COMBINE.items()
    }


def show(figures: Sequence[dict[str, Any]], uneven: Sequence[dict[str, Any]]) -> None:
    """Two tables."""
    base = next((f["tokens_per_s"] for f in figures if f["ranks"] == 1 and "error" not in f), None)
    rows = []
    for one in figures:
        if "error" in one:
            rows.append((one["name"], one["error"][:20], *[""] * 6))
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
                f"{one.get('logprob_error', 0.0):.1e}",
            )
        )
    print_table("decode", COLUMNS, rows)
    print_table(
        "heaviest rank over the mean, 512 tokens a step, a quarter of copies",
        ("trace", "ranks", "linear", "EPLB", "ours"),
        [(one["trace"], str(one["ranks"]), *(f"{one[way]:.3f}" for way in WAYS)) for one in uneven],
    )


WAYS = ("linear", "eplb", "ours")
COLUMNS = (
    *("", "tokens/s", "of 1 rank"),
    *("kB a token", "at least", "ids, sizes", "imbalance", "error"),
)


def main() -> None:
    options = _parser().parse_args()
    name = options.model or ("demo" if options.quick else "2b")
    target = next(targets([name]), None)
    if target is None:
        raise SystemExit("the model cannot be made here; take --model demo")
    counts = options.ranks or ([1, 2] if options.quick else [1, 2, 4])
    job = {"batch": options.batch, "prompt": options.prompt, "steps": options.steps}
    job |= {"steps": 16, "rounds": 1} if options.quick else {"rounds": 2}
    print_header(environment() | {"model": target.store.name} | job)
    began, made = time.monotonic(), shape(target)
    dispatch_s = dispatch_costs(made, counts, options.batch)
    uneven = imbalances(counts, quick=options.quick)
    found = points(target, counts, job, dict(options.settings), quick=options.quick)
    run(found, target, options.minutes * 60 - (time.monotonic() - began))
    alone: list[Any] = next((p.runs[0]["answers"] for p in found if p.ranks == 1 and p.runs), [])
    figures = [point.figures(made["layers"], alone) for point in found]
    show(figures, uneven)
    print_json(
        {"points": figures, "imbalance": uneven, "model": made, "job": job}
        | {"dispatch_s": dispatch_s}
        | {"environment": environment()}
    )


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure several ranks that share the experts.")
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="the shipped model, few steps, 1 and 2 ranks, no variants",
    )
    add("--ranks", **several(int), help="one or several numbers (default: 1 2 4)")
    add("--model", help="2b, demo or a store (default: 2b)")
    add("--batch", type=int, default=16, help="sequences (%(default)s)")
    add("--prompt", type=int, default=32, help="tokens of a prompt (%(default)s)")
    add("--steps", type=int, default=24, help="decode steps of a round (%(default)s)")
    add(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=_setting,
        help="one more way of several ranks",
    )
    add("--minutes", type=float, default=8.5, help="after which nothing is launched (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
