"""What is lost at so many bits an expert weight, by how the bits are allotted?

    python -m benchmarks.compression [--quick] [--seeds N] [--plot FILE.png]

The shipped model's experts are compensated on calibration text at 2, 3, 4 and 8 bits, and given
bits in six ways: uniformly (equal shares of the two nearest widths, 3 among them), and by the exact
allocation on 2, 4 and 8 bits of four models of damage; the paper's both as published, with one
budget a layer, and with one for all layers. Beside it: nested codes, whose prefixes are all
compensated, against each width done alone and against plain rounding. Test text is held out from
the model's training and from calibration; calibration text is another part of the held-out files,
another one for each seed. Fewer than 2 bits cannot be had: the format's first plane has 2. Bits are
those of the codes; scales are 0.25 more. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.compression_setup import (
    METHODS,
    ROOT,
    WIDTHS,
    Calibrated,
    Text,
    allotted,
    prefixes,
)
from kernels import ExpertWeights
from moe import MoE


def measure(
    text: Text, calibrated: Calibrated, budgets: Sequence[float], seed: int
) -> Iterator[dict[str, Any]]:
    """A point for each method and budget."""
    scores: dict[str, dict[str, float]] = {}  # methods that agree are measured once
    for bits in budgets:
        for method in METHODS:
            chosen = allotted(method, bits, calibrated.statistics, seed)
            used = mean(width for layer in chosen for width in layer)
            if str(chosen) not in scores:
                scores[str(chosen)] = text.score(calibrated.at(chosen))
            about = {"method": method, "bits": bits, "used": used, "seed": seed}
            yield about | scores[str(chosen)]


def nested(text: Text, calibrated: Calibrated) -> list[dict[str, Any]]:
    """Every prefix of nested codes, each width alone, and plain rounding."""
    points = []
    layers = list(zip(calibrated.whole, calibrated.inputs, strict=True))
    ways: dict[str, Callable[[int], Mapping[int, ExpertWeights]]] = {}
    codes = [prefixes(*layer, WIDTHS) for layer in layers]
    plain = [prefixes(*layer, WIDTHS, plain=True) for layer in layers]
    ways["nested"] = lambda bits: {i: own[bits] for i, own in enumerate(codes)}
    ways["alone"] = lambda bits: calibrated.at([[bits] * w.num_experts for w in calibrated.whole])
    ways["plain"] = lambda bits: {i: own[bits] for i, own in enumerate(plain)}
    for bits in WIDTHS:
        points += [{"way": way, "bits": bits} | text.score(at(bits)) for way, at in ways.items()]
    return points


def averaged(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        groups[point["method"], point["bits"]].append(point)
    keys = ("used", "bits_per_byte", "kl", "agreement", "routing")
    return [
        {"method": method, "bits": bits, "seeds": len(group)}
        | {key: round(mean(point[key] for point in group), 6) for key in keys}
        for (method, bits), group in groups.items()
    ]


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss against bits, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in METHODS:
        own = [(point["bits"], point["kl"]) for point in points if point["method"] == method]
        axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=method)
    axes.set(xlabel="mean bits of a code", ylabel="KL from the original, bits a token")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _rows(points: Sequence[dict[str, Any]], name: str, baseline: float) -> list[list[object]]:
    return [
        [
            point[name], point["bits"], f"{point['bits_per_byte']:.4f}",
            f"{100 * (point['bits_per_byte'] / baseline - 1):.3f}", f"{point['kl']:.5f}",
            f"{point['agreement']:.4f}", f"{point['routing']:.4f}",
        ]
        for point in points
    ]  # fmt: skip


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
    text = Text(model, 2_000 if options.quick else 6_000)
    budgets = (2.5, 3.5) if options.quick else (2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 6.0, 8.0)
    seeds = range(1 if options.quick else options.seeds)
    points: list[dict[str, Any]] = []
    for seed in seeds:
        sizes = (5_000, 512) if options.quick else (16_000, 2048)
        calibrated = Calibrated(model, seed, *sizes)
        points += measure(text, calibrated, budgets, seed)
    means, ways = averaged(points), [] if options.quick else nested(text, calibrated)
    columns = ("bits", "bits/byte", "worse by %", "KL", "same token", "same experts")
    title = f"Held-out bits per byte; {text.bits_per_byte:.5f} with the experts as they are"
    print_table(title, ("allotted by", *columns), _rows(means, "method", text.bits_per_byte))
    if ways:
        print_table("Prefixes", ("codes", *columns), _rows(ways, "way", text.bits_per_byte))
    if options.plot is not None:
        plot(means, options.plot)
    baseline = {"baseline_bits_per_byte": round(text.bits_per_byte, 6)}
    print_json({**facts, **baseline, "points": means, "prefixes": ways})


if __name__ == "__main__":
    main()
