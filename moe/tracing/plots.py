"""Findings as pictures (matplotlib, which is imported here only)."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from moe.tracing.findings import CACHES, PARTS, RUNS, Findings


def draw(findings: Findings) -> dict[str, bytes]:
    """PNG images by name."""
    from matplotlib.figure import Figure

    images = {}
    for name, plot in _PLOTS.items():
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        plot(figure.subplots(), findings)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        images[name] = buffer.getvalue()
    return images


def _load(axes: Any, findings: Findings) -> None:
    width = max(layer.num_experts for layer in findings.layers)
    grid = np.full((len(findings.layers), width), np.nan)
    for row, layer in zip(grid, findings.layers, strict=True):
        row[: layer.num_experts] = np.array(layer.load) / max(np.mean(layer.load), 1e-12)
    shown = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    axes.set(xlabel="expert", ylabel="MoE layer")
    axes.figure.colorbar(shown, label="load over the mean")


def _tokens(axes: Any, findings: Findings) -> None:
    layers = range(len(findings.layers))
    for name, what in (("pair", "token and the one before"), ("token", "token"),
                       ("popular", "the most popular experts")):  # fmt: skip
        recall = [layer.recall.get(name, np.nan) for layer in findings.layers]
        axes.plot(layers, recall, marker="o", markersize=3, label=f"table: {what}")
    own = [layer.explained for layer in findings.layers]
    axes.plot(layers, own, "--", color="grey", label="uncertainty explained by the token")
    axes.set(xlabel="MoE layer", ylabel="share", ylim=(0, 1))
    axes.legend()


def _context(axes: Any, findings: Findings) -> None:
    layers = range(len(findings.layers))
    for name, what in (("same_pair", "same token, same one before"), ("same_token", "same token"),
                       ("any_tokens", "any two tokens")):  # fmt: skip
        values = [getattr(layer, name) for layer in findings.layers]
        axes.plot(layers, values, marker="o", markersize=3, label=what)
    axes.set(xlabel="MoE layer", ylabel="experts in common", ylim=(0, 1))
    axes.legend()


def _coverage(axes: Any, findings: Findings) -> None:
    for name, what in (("law", "law: even and independent"), ("distinct_apart", "from anywhere"),
                       ("distinct", "consecutive")):  # fmt: skip
        share = [
            findings.mean(lambda layer: getattr(layer, name)[i] / layer.num_experts)  # noqa: B023
            for i in range(len(RUNS))
        ]
        axes.plot(RUNS, share, marker="o", markersize=3, label=what)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="share of a layer's experts", ylim=(0, 1), xticks=RUNS)
    axes.set_xticklabels(map(str, RUNS))
    axes.legend()


def _consistency(axes: Any, findings: Findings) -> None:
    layers = range(len(findings.layers))
    for i, times in enumerate(CACHES):
        hits = [layer.cache_hits[i] for layer in findings.layers]
        axes.plot(layers, hits, marker="o", markersize=3, label=f"oracle's cache of {times} K")
    score = [layer.segment_score for layer in findings.layers]
    axes.plot(layers, score, "--", color="grey", label="best F1 of one set for a segment")
    axes.set(xlabel="MoE layer", ylabel="share", ylim=(0, 1))
    axes.legend()


def _position(axes: Any, findings: Findings) -> None:
    share = [findings.mean(lambda layer: layer.overflow[i]) for i in range(PARTS)]  # noqa: B023
    axes.bar(range(1, PARTS + 1), share)
    axes.set(xlabel="tenth of a sequence", ylabel="visits beyond capacity")


_PLOTS: dict[str, Callable[[Any, Findings], None]] = {
    "load": _load,
    "tokens": _tokens,
    "context": _context,
    "coverage": _coverage,
    "consistency": _consistency,
    "position": _position,
}
