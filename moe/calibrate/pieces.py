"""A layer's weights a few experts at a time, wherever they are: in memory, or in a store on disk.

Experts in float32 take up to sixteen times what a store keeps of them, so no step of a calibration
holds a whole layer of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experts.weights import dequantize_experts
from kernels import ExpertWeights, QuantizedExperts
from kernels.reference import AnyExperts
from offload.experts import LayerExperts, OffloadedExperts, held_experts

PIECE_WEIGHTS = 1 << 25
"""Weights of the gated experts that are taken at once: 128 MiB in float32."""

_BIASES = ("gate_up_bias_EG", "down_bias_EH")


def pieces(layer: LayerExperts) -> Iterator[tuple[Sequence[int], ExpertWeights]]:
    """All experts of a layer, in order: their ids, and the weights that they are served with.

    Raises:
        OffloadError: an expert cannot be read.
    """
    held = held_experts(layer)
    weights = 3 * held.hidden_size * held.intermediate_size
    size = max(1, PIECE_WEIGHTS // weights)
    for start in range(0, layer.num_experts, size):
        ids = range(start, min(start + size, layer.num_experts))
        yield ids, take(layer, ids)


def take(layer: LayerExperts, experts: Sequence[int]) -> ExpertWeights:
    """Some experts of a layer, ids ascending, as a layer of their own.

    Raises:
        OffloadError: an expert cannot be read.
    """
    if not isinstance(layer, OffloadedExperts):
        return _taken(layer, experts)
    found = []
    with layer.cache.acquire(layer.layer, list(experts)) as held:
        for wave in held.waves:
            slots = wave.slot_ids[torch.tensor(wave.experts)].tolist()
            found.append(_taken(layer.slots, slots))
    return _joined(found)


def joined(parts: Sequence[QuantizedExperts]) -> QuantizedExperts:
    """One layer of the experts of several pieces, in order."""
    own: dict[str, Any] = {name: _cat([getattr(part, name) for part in parts]) for name in _BIASES}
    own["planes"] = tuple(planes for part in parts for planes in part.planes)
    own["scales"] = tuple(scales for part in parts for scales in part.scales)
    return replace(parts[0], **own)


def _taken(layer: AnyExperts, experts: Sequence[int]) -> ExpertWeights:
    """A copy, biases included."""
    chosen = torch.tensor(experts)
    own: dict[str, Any] = {
        name: None if (bias := getattr(layer, name)) is None else bias[chosen] for name in _BIASES
    }
    if isinstance(layer, QuantizedExperts):
        own["planes"] = tuple(layer.planes[expert] for expert in experts)
        own["scales"] = tuple(layer.scales[expert] for expert in experts)
        return dequantize_experts(replace(layer, **own))
    own |= {"gate_up_EGH": layer.gate_up_EGH[chosen], "down_EHF": layer.down_EHF[chosen]}
    return replace(layer, **own)


def _joined(layers: Sequence[ExpertWeights]) -> ExpertWeights:
    names = ("gate_up_EGH", "down_EHF", *_BIASES)
    own: dict[str, Any] = {name: _cat([getattr(part, name) for part in layers]) for name in names}
    return replace(layers[0], **own)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
