"""Where the time of decoding goes, by what each step was: `--parts steps` of
`benchmarks.speculation`.

No drafts, the controller and n-grams wherever there are any say the same texts in turns, from the
first token on. With everything in memory a step counts with its thread's processor time, controller
included, which other work on the machine disturbs less; else waiting for a disk is most of it, and
the clock on the wall is asked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

from benchmarks.common import print_table
from benchmarks.offload_models import Target
from benchmarks.speculation_contenders import Contender, take_turns
from benchmarks.speculation_runs import MAX_DEPTH, Prompts, load, speculator
from moe import MoE
from moe.speculate import Speculator

KINDS = ("plain", "rest", "look", "offered", "elastic")


def steps(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every contender's kinds of steps."""
    found = []
    for residency in options.residency:
        model = load(target, residency)
        clock = time.thread_time if residency == 1 else time.perf_counter
        for temperature, batch in product(options.temperatures, options.batch):
            contenders = [
                Contender("none", None, 0),
                Contender("auto", timed(model, "auto", clock), None),
                Contender("ngram", timed(model, "ngram", clock), MAX_DEPTH),
            ]
            how = Prompts(model), batch, options.tokens, temperature, options.seconds
            warm = options.tokens / 1000
            take_turns(model, contenders[:1], *how[:-1], warm, early=True)
            assert take_turns(model, contenders, *how, clock=clock)
            where = {"batch": batch, "residency": residency, "temperature": temperature}
            found += [{**where, **each} for each in by_kind(contenders)]
        model.close()
    return found


def timed(model: MoE, mode: str, clock: Callable[[], float]) -> Speculator:
    """Return what drafts, and decides by this clock."""
    made: Any = speculator(model, mode)
    parts: list[Any] = [made, made.controller, getattr(made.controller, "_planner", None)]
    for each in parts:
        if hasattr(each, "_clock"):
            each._clock = clock
    return made


def by_kind(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Of each contender and kind of step; ``lost`` is the share of the contender's time that its
    tokens would not have taken plainly, by the first contender."""
    found, a_token = list[dict[str, Any]](), 1 / contenders[0].rate
    for each in contenders:
        taken = [step for run in each.runs for step in run.steps]
        whole = sum(seconds for _, _, seconds in taken)
        for name in KINDS:
            own = [(tokens, seconds) for kind, tokens, seconds in taken if kind == name]
            if not own:
                continue
            tokens, seconds = (sum(column) for column in zip(*own, strict=True))
            found.append(
                {
                    "mode": each.name,
                    "speedup": each.rate * a_token,
                    "disk_bytes_per_token": each.a_token("disk_bytes"),
                    "kind": name,
                    "steps": len(own),
                    "tokens": tokens / len(own),
                    "median": median(seconds for _, seconds in own),
                    "mean": fmean(seconds for _, seconds in own),
                    "time": seconds / whole,
                    "lost": (seconds - tokens * a_token) / whole,
                }
            )
    return found


def show_steps(found: Sequence[dict[str, Any]]) -> None:
    names = ("batch", "residency", "temperature", "mode")
    rows = [
        [
            *(str(each[name]) for name in names),
            f"{each['speedup']:.2f}",
            f"{each['disk_bytes_per_token'] / 1e6:.2f}",
            each["kind"],
            str(each["steps"]),
            f"{each['tokens']:.2f}",
            *(f"{each[name] * 1e6:.0f}" for name in ("median", "mean")),
            *(f"{each[name]:.3f}" for name in ("time", "lost")),
        ]
        for each in found
    ]
    columns = ["batch", "resident", "T", "mode", "of none", "disk MB a token"]
    columns += ["steps that", "steps", "tokens each", "us, median", "us, mean", "of all", "lost"]
    print_table("What steps were, and took", columns, rows)
