"""``moe inspect``: show the layers of a store, and the bits of each of its experts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from experts.layer_file import WHOLE, layer_entries
from experts.manifest import Manifest, StoreError, read_manifest
from moe.commands.console import stdout_console
from moe.errors import CheckpointError, ProfileError
from moe.extras import install_line


def bit_map(manifest: Manifest) -> list[list[int]]:
    """Bits of each expert of each MoE layer, scales not counted."""
    return [list(layer.bits or (manifest.bits,) * layer.experts) for layer in manifest.layers]


def expert_bytes(manifest: Manifest) -> list[int]:
    """Bytes of the experts of each MoE layer, biases included."""
    return [
        sum(
            entry.nbytes
            for entry in layer_entries(index, layer, manifest.bits, manifest.group_size)
        )
        for index, layer in enumerate(manifest.layers)
    ]


def layer_names(manifest: Manifest) -> list[str]:
    """Return the name of each MoE layer: its number, or ``mtp`` in a multi-token-prediction
    layer."""
    return ["mtp" if layer.drafts else str(i) for i, layer in enumerate(manifest.layers)]


def run(directory: Path, image: Path | None) -> int:
    """The subcommand: returns the exit code."""
    try:
        manifest = read_manifest(directory)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    console = stdout_console()
    console.print(_table(manifest))
    console.print(_summary(manifest))
    if image is not None:
        draw(bit_map(manifest), layer_names(manifest), image)
        console.print(f"drawn: {image}")
    return 0


def draw(bits: list[list[int]], names: list[str], image: Path) -> None:
    """A heat map, layers by experts.

    Args:
        bits: of each expert of each layer.
        names: of the layers.

    Raises:
        ProfileError: matplotlib is not installed, or the image cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProfileError(f"--image needs matplotlib: {install_line('plots')}") from error
    grid: NDArray = np.full((len(bits), max(map(len, bits))), np.nan)
    for row, own in zip(grid, bits, strict=True):
        row[: len(own)] = own
    figure = Figure(figsize=(10, 1.5 + 0.2 * len(bits)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=2)
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_yticks(range(len(names)), names, fontsize=8)  # fits the rows' height
    figure.colorbar(shown, label="bits", ticks=sorted(set(grid[~np.isnan(grid)].tolist())))
    try:
        figure.savefig(image, dpi=120)
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot write {image}: {error}") from error


def _table(manifest: Manifest) -> Table:
    bits = bit_map(manifest)
    widths = sorted({width for layer in bits for width in layer})
    table = Table(title=f"{manifest.source}: experts of each MoE layer", title_justify="left")
    for name in ("layer", *(f"{width} bits" for width in widths), "mean", "MB"):
        table.add_column(name, justify="right")
    for layer, own, size in zip(layer_names(manifest), bits, expert_bytes(manifest), strict=True):
        counts = Counter(own)
        mean = sum(own) / len(own)
        row = (layer, *(counts[width] for width in widths), f"{mean:.2f}", f"{size / 1e6:,.1f}")
        table.add_row(*map(str, row))
    return table


def _summary(manifest: Manifest) -> str:
    model = manifest.without_drafts()
    total = sum(expert_bytes(model))
    weights = sum(
        layer.experts * layer.hidden * layer.intermediate * (layer.parts + 1)
        for layer in model.layers
    )
    drafts = sum(expert_bytes(manifest)) - total
    beside = f"; beside them {drafts / 1e9:.2f} GB of experts that draft (mtp)" if drafts else ""
    scales = "" if manifest.bits == WHOLE else f", groups of {manifest.group_size}"
    return (
        f"{total / 1e9:.2f} GB of experts: {8 * total / weights:.2f} bits a weight, scales "
        f"included{scales}; {100 - 100 * total / (2 * weights):.1f} % smaller than bfloat16{beside}"
    )
