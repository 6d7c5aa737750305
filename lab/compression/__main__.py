"""What is lost at so many bits an expert weight, by how the bits are allotted?

    python -m lab.compression [--quick] [--seeds N] [--plot FILE.png]

The shipped model's experts are compensated on calibration text at 1, 2, 3, 4 and 8 bits, and given
bits uniformly (equal shares of the two nearest widths) and by the exact allocation (on 2, 3, 4 and
8 bits, and 1 where there are fewer than 2) of four models of damage: the paper's both as published,
with one budget a layer, and with one for all layers. Beside it: what 0 and 1 bits would add, which
the store does not have; nested codes, whose prefixes are all compensated, against each width alone
and plain rounding; and routers repaired, against the original's routes.

Test text is held out from the model's training and from calibration; each seed has a test text, a
calibration text and a uniform draw of its own. Bits are those of the codes; scales are 0.25 more.
Figures are means over seeds, "+-" their standard deviation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from kernels.planes import PREFIX_BITS
from lab.compression.routers import with_repaired_routers
from lab.compression.setup import ROOT, Calibrated, Text, prefixes
from lab.compression.ways import METHODS, allotted
from moe import MoE

BUDGETS = (1.5, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 6.0, 8.0)
_FIGURES = ("used", "bits_per_byte", "worse_percent", "kl", "agreement", "routing")

Point = dict[str, Any]


def measure(text: Text, own: Calibrated, budgets: Sequence[float], seed: int) -> Iterator[Point]:
    """A point for each method and budget."""
    scores: dict[str, Point] = {}  # methods that agree are measured once
    for bits in budgets:
        for name, method in METHODS.items():
            chosen = allotted(method, bits, own.statistics, seed)
            if chosen is None:
                continue
            used = mean(width for layer in chosen for width in layer)
            if str(chosen) not in scores:
                scores[str(chosen)] = text.score(own.at(chosen))
            about = {"method": name, "bits": bits, "used": used}
            if 0 in METHODS[name].also:
                about["experts_of_0_bits"] = sum(layer.count(0) for layer in chosen)
            yield about | scores[str(chosen)]


def nested(text: Text, own: Calibrated) -> Iterator[Point]:
    """Every prefix of nested codes, each width alone, and plain rounding."""
    pairs = list(zip(own.whole, own.inputs, strict=True))
    ways = {
        "nested": [prefixes(*pair, PREFIX_BITS) for pair in pairs],
        "alone": own.alone,
        "plain": [prefixes(*pair, PREFIX_BITS, plain=True) for pair in pairs],
    }
    for bits in PREFIX_BITS:
        for way, layers in ways.items():
            score = text.score({index: layer[bits] for index, layer in enumerate(layers)})
            yield {"way": way, "bits": bits, "used": bits} | score


def averaged(points: Sequence[Point], name: str) -> list[Point]:
    """Means over seeds, and the standard deviation of what is lost."""
    groups: dict[tuple[str, float], list[Point]] = defaultdict(list)
    for point in points:
        groups[point[name], point["bits"]].append(point)
    found = []
    for (own, bits), group in groups.items():
        mean_of = {key: round(mean(point[key] for point in group), 6) for key in _FIGURES}
        for key in ("worse_percent", "kl"):
            mean_of[f"{key}_spread"] = (
                round(stdev(point[key] for point in group), 6) if len(group) > 1 else 0.0
            )
        layers = zip(*(point["routing_by_layer"] for point in group), strict=True)
        mean_of["routing_by_layer"] = [round(mean(shares), 4) for shares in layers]
        if "experts_of_0_bits" in group[0]:
            mean_of["experts_of_0_bits"] = mean(point["experts_of_0_bits"] for point in group)
        found.append({name: own, "bits": bits, "seeds": len(group)} | mean_of)
    return found


def plot(points: Sequence[Point], path: Path) -> None:
    """Loss against bits, a line for each method that a store can have."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in [name for name in METHODS if "also" not in name]:
        own = [(point["bits"], point["kl"]) for point in points if point["method"] == name]
        axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="mean bits of a code", ylabel="KL from the original, bits a token")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def show(title: str, points: Sequence[Point], name: str) -> None:
    columns = (name, "bits", "bits/byte", "worse by %", "+-", "KL", "+-", "same token", "experts")
    rows: list[list[object]] = [
        [
            point[name], point["bits"], f"{point['bits_per_byte']:.4f}",
            f"{point['worse_percent']:.3f}", f"{point['worse_percent_spread']:.3f}",
            f"{point['kl']:.5f}", f"{point['kl_spread']:.5f}",
            f"{point['agreement']:.4f}", f"{point['routing']:.4f}",
        ]
        for point in points
    ]  # fmt: skip
    print_table(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two budgets, less text")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    parser.add_argument("--seeds", type=int, default=3, help="calibrations (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model)
    points: list[Point] = []
    ways: list[Point] = []
    routers: list[Point] = []
    baselines: list[float] = []
    for seed in range(1 if options.quick else options.seeds):
        text = Text(model, seed, 2_000 if options.quick else 8_000)
        own = Calibrated(model, seed, *((5_000, 512) if options.quick else (16_000, 2048)))
        points += measure(text, own, (2.5, 3.5) if options.quick else BUDGETS, seed)
        ways += [] if options.quick else nested(text, own)
        routers += with_repaired_routers(
            text, own, (2.0,) if options.quick else (2.0, 2.5, 3.0, 4.0)
        )
        baselines.append(text.bits_per_byte)
        print(f"seed {seed}: {text.bits_per_byte:.5f} bits a byte as it is", flush=True)
    means = averaged(points, "method")
    show("Bits allotted by", means, "method")
    if ways:
        show("Prefixes", averaged(ways, "way"), "way")
    show("Routers, at the bits that ours gives", averaged(routers, "routers"), "routers")
    if options.plot is not None:
        plot(means, options.plot)
    print_json(
        {
            **facts,
            "baseline_bits_per_byte": round(mean(baselines), 6),
            "points": means,
            "prefixes": averaged(ways, "way"),
            "routers": averaged(routers, "routers"),
        }
    )


if __name__ == "__main__":
    main()
