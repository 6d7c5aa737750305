"""What is each router worth? The laboratory's variants, trained alike, run through the engine.

    python -m lab.routers [--quick] [--work DIR] [--routers NAME ...] [--plot FILE]

Trains every variant of ``lab/routers`` that is not in the work folder yet (minutes each on a core)
and reads the same held-out text with it: bits per byte; balance by step and over all text beside
what sampling alone would give; entropy of the scores; how many choices change over the last quarter
of training (fluctuation) and stay when a tenth of the tokens is replaced (noise); experts shared
with the token before (reuse) and needed by 8 tokens in a row (union); hits of an LRU cache of a
quarter of all experts, and of the best possible one; which share of the visits is foretold by
popularity and by each predictor of ``moe calibrate`` (`lab.routers.recall`), learnt from as
much of the training text. Then the papers' claims, and how many seeds show each. Nothing is timed.
`--quick` trains two variants for a few steps on little text. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers

from benchmarks.common import environment, print_header, print_json, print_table
from examples import demo_data as data
from lab.routers.claims import CLAIMS, FORETOLD, Claim, Results
from lab.routers.metrics import measure
from lab.routers.train import LENGTH, load_corpus, train
from lab.routers.variants import VARIANTS

LEARNT_SEED = 1000
"""Of the windows of training text that predictors learn from: no model's own order."""
QUICK = ("softmax", "relu-local")
RECALLS = {
    "recall_popular": "popular",
    "recall_token_table": "token table",
    "recall_path": "path",
    "recall_lookahead_raw": "look-ahead, raw",
    "recall_lookahead": "look-ahead",
    "recall_ensemble": "ensemble",
}
COLUMNS = {
    "experts_a_token": "experts",
    "bits_per_byte": "bits/byte",
    "max_violation": "MaxVio",
    "floor": "(floor)",
    "max_violation_batch": "a step",
    "floor_batch": "(floor)",
    "entropy_bits": "entropy",
    "fluctuation": "fluctuation",
    "kept_under_noise": "noise",
    "reuse": "reuse",
    "union": "union of 8",
    "chunk_sparsity": "CLS 8",
    "cache_hits": "LRU 25 %",
    "cache_best": "(best)",
    **RECALLS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two variants, a few steps")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/moe-lab")
    parser.add_argument("--routers", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--trained", action="store_true", help="train nothing that is not there")
    parser.add_argument("--plot", type=Path, help="draw the figures into this PNG file")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    facts = environment()
    print_header(facts)
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            options.work, options.seeds, options.steps = Path(scratch), 1, 4
            options.routers = list(QUICK)
        results, tokens = collect(options)
    show(results)
    if options.plot is not None:
        from lab.routers.plot import plot

        plot(results, options.plot)
    print_json({**facts, "steps": options.steps, "tokens": tokens, "results": results})


def collect(options: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Figures of each variant and seed, and how many held-out tokens were read."""
    corpus = load_corpus(options.work, options.quick)
    each = 4 if options.quick else 64
    windows, streams = heldout(corpus, each), list(corpus.train.values())
    learnt = data.training_batch(streams, LENGTH, len(windows), 0, LEARNT_SEED).tolist()
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for name in options.routers:
            folder = options.work / f"{name}-{seed}"
            if not (folder / "model.safetensors").exists():
                if options.trained:
                    continue
                train(name, corpus, folder, seed=seed, steps=options.steps)
            results.setdefault(name, []).append(measured(folder, learnt, windows, seed))
    return results, sum(map(len, windows))


def measured(
    folder: Path, learnt: Sequence[list[int]], windows: Sequence[list[int]], seed: int
) -> dict[str, Any]:
    """Figures of one model, kept beside it."""
    kept = folder / f"figures-{len(windows)}.json"
    if not kept.exists():
        kept.write_text(json.dumps(measure(folder, learnt, windows, seed)))
    figures: dict[str, Any] = json.loads(kept.read_text())
    return figures


def heldout(corpus: data.Corpus, each: int) -> list[list[int]]:
    """So many windows of each domain, the domains in turn."""
    parts = [tokens.long().split(LENGTH)[:each] for tokens in corpus.heldout.values()]
    return [window.tolist() for group in zip(*parts, strict=True) for window in group]


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    names = list(COLUMNS)
    parts = {"Quality and balance": names[:8], "Locality": names[8:14], "Recall": names[14:]}
    for title, part in parts.items():
        print_table(
            f"{title}, mean of seeds",
            ("router", "seeds", *(COLUMNS[name] for name in part)),
            [
                [router, len(runs), *(_cell([run.get(name) for run in runs]) for name in part)]
                for router, runs in results.items()
            ],
        )
    columns = ("row", "routers", "figure", "expected", "measured", "seeds", "the paper")
    claims = [claim for claim in CLAIMS if {claim.variant, claim.other} <= results.keys()]
    print_table("Directions of the papers", columns, [_claimed(c, results) for c in claims])
    print_table(
        "Directions of predictors",
        ("row", "predictors", "measured", "models", "the paper"),
        foretold(results),
    )


def foretold(results: Results) -> list[tuple[object, ...]]:
    """A row for each claim that can be looked at: means of all models, and how many show it."""
    rows: list[tuple[object, ...]] = []
    for claim in FORETOLD:
        if pairs := claim.pairs(results):
            ours, theirs = (mean(values) for values in zip(*pairs, strict=True))
            seen = f"{sum(a > b for a, b in pairs)} of {len(pairs)}"
            names = f"{RECALLS[claim.better]} / {RECALLS[claim.other]}"
            rows.append((claim.row, names, f"{ours:.3f} / {theirs:.3f}", seen, claim.paper))
    return rows


def _claimed(claim: Claim, results: Results) -> list[object]:
    seen, of = claim.seen(results)
    ours, theirs = (
        mean(run[claim.metric] for run in results[variant][:of])
        for variant in (claim.variant, claim.other)
    )
    return [
        claim.row,
        f"{claim.variant} / {claim.other}",
        COLUMNS[claim.metric],
        claim.direction,
        f"{ours:.3f} / {theirs:.3f}",
        f"{seen} of {of}",
        claim.paper,
    ]


def _cell(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    spread = (max(there) - min(there)) / 2
    return f"{mean(there):.3f}" + (f" ±{spread:.3f}" if len(there) > 1 else "")


if __name__ == "__main__":
    main()
