"""What does a balanced plan cost a training step? (Selective Sinkhorn)

    python -m lab.routers.sinkhorn [--quick] [--steps N] [--work DIR]

The laboratory's model is trained, and in every other step each layer chooses by a plan: CPU time of
the process for either kind of step, medians. A layer draws for itself whether a step is
one with a plan, so at a share p of the steps the overhead is p times that of a plan in every step.
The paper asks for 0.1 to 1 % of the steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import environment, print_header, print_json, print_table
from examples import demo_data as data
from examples.train_demo import build_optimizer
from lab.routers import router
from lab.routers.objectives import watched_routers
from lab.routers.routers import TransportPlan, sinkhorn
from lab.routers.train import BATCH, LENGTH, build_model, load_corpus, training_step
from lab.routers.variants import VARIANTS

SHARES = (0.001, 0.01, 0.2, 1.0)
RATE = 1e-3


def measure(corpus: data.Corpus, steps: int) -> dict[str, Any]:
    """Milliseconds of CPU of a step without and with plans, and rounds of a plan."""
    variant = VARIANTS["unbalanced"]
    model = build_model(variant, len(corpus.tokenizer), corpus.tokenizer.eos_token_id, 0).train()
    optimizer, streams = build_optimizer(model, RATE), list(corpus.train.values())
    rounds: list[int] = []
    seconds: dict[float, list[float]] = {0.0: [], 1.0: []}

    def counted(*arguments: Any) -> TransportPlan:
        plan = sinkhorn(*arguments)
        rounds.append(plan.rounds)
        return plan

    with watched_routers(model) as calls, patch.object(router, "sinkhorn", counted):
        for step in range(2 * steps):
            share = float(step % 2)
            model.config.sinkhorn_share = share
            batch = data.training_batch(streams, LENGTH, BATCH, step, 0)
            begun = time.process_time()
            training_step(model, variant, calls, batch, optimizer, step)
            if step > 1:  # the first of each kind also warms up
                seconds[share].append(time.process_time() - begun)
            calls.clear()
    plain, planned = (1000 * median(seconds[share]) for share in (0.0, 1.0))
    return {"plain_ms": plain, "planned_ms": planned, "rounds": sum(rounds) / len(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps on little text")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-lab")
    parser.add_argument("--steps", type=int, default=100, help="of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    print_header(facts)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) if options.quick else options.work
        corpus = load_corpus(work, options.quick)
        found = measure(corpus, 4 if options.quick else options.steps)
    extra = found["planned_ms"] / found["plain_ms"] - 1
    print_table(
        "CPU time of a training step",
        ("without, ms", "a plan in every layer, ms", "rounds of a plan"),
        [[f"{found['plain_ms']:.1f}", f"{found['planned_ms']:.1f}", f"{found['rounds']:.1f}"]],
    )
    print_table(
        "Overhead",
        ("share of steps %", "slower by %"),
        [[f"{100 * share:g}", f"{100 * share * extra:.3f}"] for share in SHARES],
    )
    print_json({**facts, **found, "overhead": {f"{p:g}": p * extra for p in SHARES}})


if __name__ == "__main__":
    main()
