"""Ways to allot bits that `lab.compression` compares. Legend: E experts, W widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experts.compress.allocation import Damage, allocate, predicted_damage
from experts.compress.statistics import LayerCalibration
from kernels.planes import PREFIX_BITS
from lab.compression.setup import GROUP_SIZE, WIDTHS, Bits

_SCALE_BITS = 16


@dataclass(frozen=True)
class Method:
    """A way to allot bits.

    Attributes:
        damage: what the exact allocation predicts damage by; None: bits are drawn.
        also: widths beside `PREFIX_BITS`.
        by_layer: each layer has a budget of its own, as the paper's have.
        budgets: lowest and highest mean bits at which it says something of its own.
    """

    damage: str | None
    also: tuple[int, ...] = ()
    by_layer: bool = False
    budgets: tuple[float, float] = (0, 8)


METHODS = {
    "uniform": Method(None, (1,)),
    "frequency": Method("frequency"),
    "error": Method("error"),
    "paper": Method("paper", by_layer=True),
    "paper, one budget": Method("paper"),
    "ours": Method("measured"),
    "ours, also 1": Method("measured", (1,), budgets=(2, 2.5)),
    "ours, also 0": Method("measured", (0,), budgets=(1.5, 2.5)),
    "ours, also 0 and 1": Method("measured", (0, 1), budgets=(1.5, 2)),
}


def allotted(
    method: Method, bits: float, statistics: Sequence[LayerCalibration], seed: int
) -> Bits | None:
    """Bits of every expert, `bits` in the mean; None where the method has nothing to say.

    Below 2 bits every method may use 1, unless it has 0.
    """
    if not method.budgets[0] <= bits <= method.budgets[1]:
        return None
    sign = (1,) if bits < 2 and 0 not in method.also else ()
    widths = sorted({*PREFIX_BITS, *method.also, *sign})
    counts = [len(layer.frequency_E) for layer in statistics]
    if method.damage is None:
        return _uniform(bits, widths, counts, seed)
    if method.by_layer:
        return [_allocate([layer], method.damage, widths, bits)[0] for layer in statistics]
    return _allocate(statistics, method.damage, widths, bits)


def _uniform(bits: float, widths: Sequence[int], counts: Sequence[int], seed: int) -> Bits:
    """The two nearest widths, in shares that give the mean, whoever the experts are."""
    low = max(width for width in widths if width <= bits)
    high = min(width for width in widths if width >= bits)
    total = sum(counts)
    finer = 0 if low == high else round(total * (bits - low) / (high - low))
    drawn = np.full(total, low)
    drawn[np.random.default_rng(seed).permutation(total)[:finer]] = high
    return _by_layer(drawn, counts)


def _allocate(
    statistics: Sequence[LayerCalibration], damage: str, widths: Sequence[int], bits: float
) -> Bits:
    """Exactly; an expert of 0 bits saves its scales, too."""
    counts, at = [len(layer.frequency_E) for layer in statistics], [WIDTHS.index(w) for w in widths]
    own = [
        replace(layer, error_EW=layer.error_EW[:, at], kl_W=layer.kl_W[at]) for layer in statistics
    ]
    sizes = [GROUP_SIZE * width + _SCALE_BITS * (width > 0) for width in widths]
    budget = int((GROUP_SIZE * bits + _SCALE_BITS) * sum(counts))
    choice = allocate(
        _predicted(own, damage, widths), np.tile(np.array(sizes), (sum(counts), 1)), budget
    )
    return _by_layer(np.array(widths)[choice], counts)


def _predicted(layers: Sequence[LayerCalibration], model: str, widths: Sequence[int]) -> Damage:
    """``(E, W)`` damage by one of four models.

    "frequency" knows only how often an expert is chosen, and that a bit halves an error. "error" is
    the squared error of the layer's output. "paper" multiplies that by frequency and mean routing
    weight, as PMQ does (with a = b = 1 and c = 2), although the error contains them. "measured" is
    the product's.
    """
    halved_W = torch.tensor([4.0**-bits for bits in widths], dtype=torch.float64)
    models = {
        "frequency": lambda layer: layer.frequency_E[:, None] * halved_W,
        "error": lambda layer: layer.error_EW,
        "paper": lambda layer: (layer.frequency_E * layer.weight_E)[:, None] * layer.error_EW,
    }
    if model == "measured":
        return predicted_damage(layers)
    return np.concatenate([models[model](layer).double().numpy() for layer in layers])


def _by_layer(bits: Any, counts: Sequence[int]) -> Bits:
    return [part.tolist() for part in np.split(bits, np.cumsum(counts)[:-1])]
