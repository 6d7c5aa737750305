"""Plots of findings, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from moe.commands.trace.findings import CACHES, CAPACITY, PARTS, RUNS, SEGMENT, Findings, Floats

PANELS = 6
"""Most layers whose co-activation is plotted."""

_STRONGEST = 3
"""Largest power of two of the colour scale."""


def draw(findings: Findings) -> dict[str, bytes]:
    """PNG images by name."""
    from matplotlib.figure import Figure

    images = {}
    for name, (title, plot) in _PLOTS.items():
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        figure.suptitle(f"{title} ({findings.model})", fontsize=11)
        plot(figure, findings)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        images[name] = buffer.getvalue()
    return images


def _load(figure: Any, findings: Findings) -> None:
    from matplotlib.colors import TwoSlopeNorm

    width = max(layer.num_experts for layer in findings.layers)
    grid = np.full((len(findings.layers), width), np.nan)
    for row, layer in zip(grid, findings.layers, strict=True):
        row[: layer.num_experts] = np.array(layer.load) / max(np.mean(layer.load), 1e-12)
    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=max(2.0, float(np.nanmax(grid))))
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="coolwarm", norm=norm)
    axes.set(xlabel="expert", ylabel="MoE layer")
    _whole_numbers(axes.xaxis, axes.yaxis)
    figure.colorbar(shown, label="visits, over the layer's mean")


def _company(figure: Any, findings: Findings) -> None:
    shown = np.unique(np.linspace(0, len(findings.layers) - 1, PANELS).round().astype(int))
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure.set_size_inches(7.5, 1 + 2.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, index in zip(panels.flat, shown, strict=False):
        image = axes.imshow(
            by_coactivation(findings.layers[index].lift), interpolation="nearest", cmap="coolwarm",
            vmin=-_STRONGEST, vmax=_STRONGEST,
        )  # fmt: skip
        axes.set_facecolor("lightgrey")
        axes.set_title(f"MoE layer {index}", fontsize=10)
        axes.set(xticks=[], yticks=[])
    figure.supxlabel("experts, those that go together side by side", fontsize=10)
    ticks = range(-_STRONGEST, _STRONGEST + 1)
    bar = figure.colorbar(image, ax=panels, ticks=ticks, label="together, times as by chance")
    bar.ax.set_yticklabels([f"{2.0**power:g}" for power in ticks])


def by_coactivation(lift: Floats) -> Floats:
    """log2 of the lift, experts in a chain: after each, the one with the highest lift."""
    with np.errstate(divide="ignore"):
        times = np.log2(lift)
    liking = np.nan_to_num(times, nan=-np.inf)
    chain, left = [0], list(range(1, len(times)))
    while left:
        chain.append(left.pop(int(np.argmax(liking[chain[-1], left]))))
    ordered: Floats = times[np.ix_(chain, chain)]
    return ordered


def _whole_numbers(*lines: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in lines:
        line.set_major_locator(MaxNLocator(integer=True))


def _tokens(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    layers = range(len(findings.layers))
    for name, what in (("pair", "token and the one before"), ("token", "token"),
                       ("popular", "the most popular experts")):  # fmt: skip
        recall = [layer.recall.get(name, np.nan) for layer in findings.layers]
        axes.plot(layers, recall, marker="o", markersize=3, label=f"table: {what}")
    own = [layer.explained for layer in findings.layers]
    axes.plot(layers, own, "--", color="grey", label="uncertainty explained by the token")
    axes.set(xlabel="MoE layer", ylabel="share of visits named", ylim=(0, 1))
    _finish(axes)


def _context(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    layers = range(len(findings.layers))
    for name, what in (("same_pair", "same token, same one before"), ("same_token", "same token"),
                       ("any_tokens", "any two tokens")):  # fmt: skip
        values = [getattr(layer, name) for layer in findings.layers]
        axes.plot(layers, values, marker="o", markersize=3, label=what)
    axes.set(xlabel="MoE layer", ylabel="share of experts in common", ylim=(0, 1))
    _finish(axes)


def _coverage(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    for name, what in (("law", "law: even and independent"), ("distinct_apart", "from anywhere"),
                       ("distinct", "consecutive")):  # fmt: skip
        share = [
            findings.mean(lambda layer: getattr(layer, name)[i] / layer.num_experts)  # noqa: B023 - called at once
            for i in range(len(RUNS))
        ]
        axes.plot(RUNS, share, marker="o", markersize=3, label=what)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens together", ylabel="share of a layer's experts", ylim=(0, 1.02))
    axes.set_xticks(RUNS, map(str, RUNS))
    _finish(axes, whole=False)


def _consistency(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    layers = range(len(findings.layers))
    for i, times in enumerate(CACHES):
        hits = [layer.cache_hits[i] for layer in findings.layers]
        axes.plot(layers, hits, marker="o", markersize=3, label=f"oracle's cache of {times} K")
    score = [layer.segment_score for layer in findings.layers]
    axes.plot(layers, score, "--", color="grey", label="best F1 of one set for a segment")
    axes.set(xlabel="MoE layer", ylabel=f"share of visits, segments of {SEGMENT}", ylim=(0, 1))
    _finish(axes)


def _position(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    share = [findings.mean(lambda layer: layer.overflow[i]) for i in range(PARTS)]  # noqa: B023 - called at once
    axes.bar(range(1, PARTS + 1), share, zorder=2)
    axes.set(xlabel="tenth of a sequence", ylabel="share of visits")
    axes.set_xticks(range(1, PARTS + 1))
    axes.grid(axis="y", alpha=0.3)


def _finish(axes: Any, *, whole: bool = True) -> None:
    if whole:
        _whole_numbers(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend()


_PLOTS: dict[str, tuple[str, Callable[[Any, Findings], None]]] = {
    "load": ("Load of experts", _load),
    "company": ("Experts that serve the same tokens", _company),
    "tokens": ("How far the token determines the expert", _tokens),
    "context": ("Experts of the same token in different contexts", _context),
    "coverage": ("Experts that tokens need together, and the law", _coverage),
    "consistency": ("Local routing consistency", _consistency),
    "position": (f"Visits beyond a capacity of {CAPACITY} equal shares", _position),
}
