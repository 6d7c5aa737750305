"""Does drafting pay: how much is accepted, what does it read, how fast is it, and who chose best?

    python -m benchmarks.speculation [--quick] [--parts account steps real]

- account: what the controller decides against every fixed choice, on texts of the shipped model,
  with times that are drawn (`benchmarks.speculation_worth`): no load of this machine's in it;
- steps: what of the time steps took that look, rest and draft (`benchmarks.speculation_steps`);
- real: the shipped model end to end, all in memory and with a half and a quarter of its experts,
  greedy and at temperature 0.8, on held-out text of three domains: no drafts, the controller,
  n-grams wherever there are any, and fixed depths of the elastic mode, in turns on the same
  prompts. All must say the same, at temperature 0.8 by seeds. The controller begins with knowing
  nothing: ``early`` is its speed-up in its first seconds.

Each part takes minutes: ``--parts``, ``--residency`` and ``--temperatures`` divide it.
``bytes_per_token`` is read from disk where experts are there, from memory elsewhere, drafts
included. ``of best`` compares with the best of all fixed depths, none included, chosen in
hindsight: the largest of several noisy rates, so it is on the low side. ``apart`` chooses the best
on half of the rounds and compares on the others, both ways. ``noise`` is the standard error of a
speed-up, from round to round, and ``median`` the median of the rounds: a stall of the machine in
one round does not move it. The last line is JSON.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.common import environment, print_header, print_json, several
from benchmarks.offload_models import Target, targets
from benchmarks.speculation_contenders import Contender, median_errors, take_turns
from benchmarks.speculation_runs import MAX_DEPTH, Prompts, fixed, load, speculator
from benchmarks.speculation_steps import show_steps, steps
from benchmarks.speculation_tables import (
    describe,
    show,
)
from benchmarks.speculation_worth import account, show_account
from moe import MoE
from moe.speculate.draft import Mode

PARTS = ("account", "steps", "real")
BATCHES = (1, 2, 4, 8, 16)


def real(
    target: Target, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool, dict[str, float | None]]:
    """Points of the shipped model, whether all said the same, and the errors of times."""
    found, same, ours = [], True, list[Contender]()
    for residency in options.residency:
        model = load(target, residency)
        mode = Mode("elastic", bits=4)
        for temperature, batch in product(options.temperatures, options.batch):
            contenders = [
                Contender("none", None, 0),
                Contender("auto", speculator(model), None),
                Contender("ngram", speculator(model, "ngram"), MAX_DEPTH),
                *(
                    Contender(mode.name, fixed(model, mode, depth), depth)
                    for depth in options.depths
                ),
            ]
            how = Prompts(model), batch, options.tokens, temperature
            same &= take_turns(model, contenders[:2], *how, options.early, early=True)
            same &= take_turns(model, contenders, *how, options.seconds)
            where = {"batch": batch, "residency": residency, "temperature": temperature}
            found += describe(contenders, where)
            ours.append(contenders[1])
            print(where, [f"{c.name}{c.depth or ''} {c.rate:.1f}" for c in contenders], flush=True)
        model.close()
    return found, same, median_errors(ours)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few cells, two batches")
    add("--parts", nargs="+", choices=PARTS, default=None)
    add("--batch", **several(int), default=None)
    add("--residency", **several(float), default=None)
    add("--temperatures", **several(float), default=None)
    add("--depths", **several(int), default=None, help="fixed ones")
    add("--early", type=float, default=None, help="seconds of learning, measured by themselves")
    add("--seconds", type=float, default=None, help="of the first contender after that")
    add("--tokens", type=int, default=None, help="of each decoding")
    options = parser.parse_args()
    quick = options.quick
    options.parts = options.parts or (["real"] if quick else list(PARTS))
    options.batch = options.batch or ([1, 4] if quick else list(BATCHES))
    options.residency = options.residency or ([1.0, 0.5] if quick else [1.0, 0.5, 0.25])
    options.temperatures = options.temperatures or ([0.0] if quick else [0.0, 0.8])
    options.depths = options.depths or ([1, 3] if quick else list(range(1, MAX_DEPTH + 1)))
    options.early = options.early or (0.5 if quick else 5.0)
    options.seconds = options.seconds or (0.5 if quick else 4.0)
    options.tokens = options.tokens or (48 if quick else 192)
    return options


def main() -> None:
    options = parse()
    facts = environment()
    print_header(facts)
    target = next(targets(["demo"]))
    result: dict[str, Any] = {"lossless": None, "points": [], "predicted_vs_measured_error": None}
    if "account" in options.parts:
        decided = account(MoE.from_pretrained(target.store), options)
        show_account(decided)
        result["account"] = decided
    if "steps" in options.parts:
        result["steps"] = steps(target, options)
        show_steps(result["steps"])
    if "real" in options.parts:
        points_, same, errors = real(target, options)
        show("The shipped model, end to end", points_)
        result |= {"lossless": same, "points": points_, "predicted_vs_measured_error": errors}
    print_json({**facts, **result})


if __name__ == "__main__":
    main()
