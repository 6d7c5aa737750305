"""The figures of `lab.routers` as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

PANELS = {
    "bits_per_byte": "bits per byte (axis cut)",
    "max_violation": "MaxVio of all text (0: even)",
    "chunk_sparsity": "share of experts that 8 tokens leave alone",
    "cache_hits": "share of hits, LRU cache of 25 %",
    "reuse": "share of experts of the token before",
    "fluctuation": "share of choices changed, last quarter",
}


def plot(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """One panel a figure, one bar a router, one dot a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    figure.suptitle("Routers of the laboratory: mean of seeds, and each seed")
    names = list(results)
    for axis, (metric, title) in zip(axes.flat, PANELS.items(), strict=True):
        for place, name in enumerate(names):
            values = [run[metric] for run in results[name]]
            axis.barh(place, mean(values), color="#9ecae1")
            axis.plot(values, [place] * len(values), "k.", markersize=4)
        lowest = min(run[metric] for runs in results.values() for run in runs)
        if metric == "bits_per_byte":
            axis.set_xlim(left=0.95 * lowest)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.set_title(title)
    figure.savefig(path, dpi=110)
