"""Does drafting change a token? Every way x bits x depth x share of experts in memory x batch.

    python -m lab.speculation.lossless [--minutes 8] [--prompts 216] [--again]

Greedy decoding of the shipped model at 8 bits behind 216 prompts in each cell, in batches of 8 and
one by one, against decoding without drafts and with all experts in memory. It takes longer than
anybody wants to wait: with fewer ``--prompts`` each cell has other ones of them than the cell
before; after ``--minutes`` it stops between two cells, and the next run goes on where this one
stopped; ``--again`` begins anew, as one has to when the code has changed. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_header, print_json
from benchmarks.offload_models import Target, targets
from benchmarks.speculation_runs import Prompts, load, speculator
from examples.models.random_models import bench_dir
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.speculate import Speculator
from tests.oracles.draft_modes import NEW_TOKENS, WAYS

DEPTHS = (1, 4, 15)
RESIDENCY = (1.0, 0.5, 0.25)
BATCHES = (8, 1)
COUNT = 216
SHORT = 12
"""Tokens of a prompt."""

Tokens = list[list[int]]


def decoded(
    model: MoE, drafts: Speculator | None, prompts: Sequence[list[int]], batch: int
) -> Tokens:
    """Return what a model says after each prompt."""
    engine = model.engine(drafts=False)
    assert isinstance(engine, Engine)
    engine.runner._speculator = drafts  # type: ignore[attr-defined]
    engine.scheduler.engine = engine.scheduler.engine.model_copy(update={"max_batch_size": batch})
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        engine.step()
    return [group.sequences[0].token_ids for group in groups]


def compare(
    target: Target, known: list[dict[str, Any]], file: Path, count: int, deadline: float
) -> None:
    """Run the cells that are not known yet, and write each into the file when it is done."""
    whole = load(target, 1.0)
    prompts = [prompt[:SHORT] for prompt in Prompts(whole).take(COUNT)]
    expected = decoded(whole, None, prompts, BATCHES[0])
    names = ("batch", "residency", "way", "depth")
    done = {tuple(cell[name] for name in names) for cell in known}
    for batch, residency in product(BATCHES, RESIDENCY):
        cells = [(batch, residency, *each) for each in product(WAYS, DEPTHS)]
        cells = [cell for cell in cells if cell not in done]
        if not cells or time.monotonic() > deadline:
            continue
        model = whole if residency == 1 else load(target, residency)
        for at in cells:
            if time.monotonic() > deadline:
                break
            _, _, way, depth = at
            drafts = speculator(model, max_depth=depth, **WAYS[way])
            own = [(len(known) * count + index) % COUNT for index in range(count)]
            found = decoded(model, drafts, [prompts[index] for index in own], batch)
            cell = {
                **dict(zip(names, at, strict=True)),
                "sequences": count,
                "different": sum(a != expected[i] for a, i in zip(found, own, strict=True)),
                "tokens_per_verification": drafts.figures()["tokens_per_verification"],
            }
            known.append(cell)
            file.open("a").write(json.dumps(cell) + "\n")
            print(cell, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--prompts", type=int, default=COUNT, help="of a cell, 216 at most")
    parser.add_argument("--again", action="store_true", help="forget what has been compared")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    file = bench_dir() / "speculation-lossless.jsonl"
    if options.again:
        file.unlink(missing_ok=True)
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    end = time.monotonic() + 60 * options.minutes
    compare(next(targets(["demo"])), known, file, options.prompts, end)
    print_json(
        {
            **facts,
            "cells": len(known),
            "of": len(WAYS) * len(DEPTHS) * len(RESIDENCY) * len(BATCHES),
            "sequences": sum(cell["sequences"] for cell in known),
            "different": sum(cell["different"] for cell in known),
        }
    )


if __name__ == "__main__":
    main()
