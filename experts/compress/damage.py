"""What each choice of bits is predicted to cost, by four models.

``frequency`` knows only how often an expert is chosen, and that a bit halves an error; ``error`` is
the squared error of the layer's output; ``paper`` multiplies that by frequency and mean routing
weight, as PMQ does (with a = b = 1 and c = 2), although the error has them
already; ``measured`` shares out among a layer's experts, by their squared errors, what the whole
model was measured to lose with that layer at those bits. Only the last knows that layers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from experts.compress.allocation import Damage
from experts.compress.statistics import LayerStatistics
from kernels.planes import PREFIX_BITS


def predicted_damage(
    layers: Sequence[LayerStatistics],
    model: str = "measured",
    widths: Sequence[int] = PREFIX_BITS,
) -> Damage:
    """``(E, W)`` of the experts of all layers, one layer after the other.

    Args:
        layers: statistics of each MoE layer.
        model: one of `DAMAGE_MODELS`.
        widths: those that the statistics are of, ascending.
    """
    found = [DAMAGE_MODELS[model](layer, widths).double().numpy() for layer in layers]
    return np.concatenate(found)


def _frequency(layer: LayerStatistics, widths: Sequence[int]) -> Tensor:
    errors = torch.tensor([4.0**-bits for bits in widths], dtype=torch.float64)
    return layer.frequency_E[:, None] * errors


def _error(layer: LayerStatistics, _: Sequence[int]) -> Tensor:
    return layer.error_EW


def _paper(layer: LayerStatistics, _: Sequence[int]) -> Tensor:
    return (layer.frequency_E * layer.weight_E)[:, None] * layer.error_EW


def _measured(layer: LayerStatistics, _: Sequence[int]) -> Tensor:
    least_W = layer.kl_W.cummin(0).values  # near nothing, noise makes finer weights look worse
    return least_W * layer.error_EW / layer.error_EW.sum(0).clamp_min(1e-300)


DAMAGE_MODELS: dict[str, Callable[[LayerStatistics, Sequence[int]], Tensor]] = {
    "frequency": _frequency,
    "error": _error,
    "paper": _paper,
    "measured": _measured,
}
