"""Which part of a model drafts best, and do drafts pay at the size of 30 billion parameters?

    python -m lab.speculation [--quick] [--parts grid replayed]

- grid: the shipped model's acceptance of drafts by a part of it (`lab.speculation.grid`);
- replayed: the store of 30 billion parameters, a half and a quarter resident, with routing of
  published locality, saying what the shipped model says, and taking as much of the drafts by the
  model itself as that does at the same share of residents: times are real, what is accepted is the
  shipped model's (`lab.speculation.large`). With ``--batch 1 --depths 3``, one share and one
  temperature it takes some minutes.

Columns are those of `benchmarks.speculation`. The last line is JSON.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.common import environment, print_header, print_json, several
from benchmarks.offload_models import ROOT, Target, targets
from benchmarks.speculation_runs import MAX_DEPTH
from benchmarks.speculation_tables import show
from lab.speculation.grid import Grid, points
from lab.speculation.large import replayed
from lab.speculation.tables import choices, directions, show_choices, show_grid
from moe import MoE

PARTS = ("grid", "replayed")


def the_grid(target: Target) -> Grid:
    """Of the shipped model."""
    whole = MoE.from_pretrained(ROOT / "examples/demo-model")
    return Grid(MoE.from_pretrained(target.store), whole)


def cells_of(grid: Grid, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell at each temperature."""
    count, tokens = (1, 24) if options.quick else (options.prompts, 64)
    found = []
    for temperature, point in product(options.temperatures, points(options.quick)):
        found.append(grid.measure(point, count, tokens, temperature))
        print(temperature, point, found[-1]["acceptance"], flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few cells, no 30 B store")
    add("--parts", nargs="+", choices=PARTS, default=None)
    add("--batch", **several(int), default=[1, 2, 4, 8, 16])
    add("--residency", **several(float), default=[0.5, 0.25])
    add("--temperatures", **several(float), default=None)
    add("--depths", **several(int), default=list(range(1, MAX_DEPTH + 1)), help="fixed ones")
    add("--prompts", type=int, default=8, help="of each domain, for each cell of the grid")
    options = parser.parse_args()
    options.parts = options.parts or (["grid"] if options.quick else list(PARTS))
    options.temperatures = options.temperatures or ([0.0] if options.quick else [0.0, 0.8])
    return options


def main() -> None:
    options = parse()
    facts = environment()
    print_header(facts)
    grid = the_grid(next(targets(["demo"])))
    result: dict[str, Any] = {}
    if "grid" in options.parts:
        cells = cells_of(grid, options)
        show_grid(cells)
        show_choices(cells)
        result |= {"grid": cells, "directions": directions(cells), "choices": choices(cells)}
        print(result["directions"], flush=True)
    if "replayed" in options.parts:
        found, same, errors = replayed(grid, options)
        show("30 B store: real times, replayed routing, text of the shipped model", found)
        result |= {"replayed": found, "replayed_same": same, "replayed_error": errors}
    print_json({**facts, **result})


if __name__ == "__main__":
    main()
