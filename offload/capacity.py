"""Computes the memory of a store's experts, and how many fit; makes the arena that holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import torch

from experts.layer_file import WHOLE
from experts.manifest import Manifest, MoELayerRecord
from experts.safetensors_io import DTYPES
from kernels import ExpertWeights
from offload.arena import Arena, grain_bytes, plane_arena, whole_arena
from offload.cache import LEAST_SLOTS
from offload.slots import SlotSizes


@dataclass(frozen=True)
class Capacity:
    """Numbers of experts that fit in each memory.

    Attributes:
        device: where kernels run.
        slots: experts in its memory.
        host_slots: experts in host memory, for a device that is not a CPU.
        pinned_slots: how many of those may be page-locked.
    """

    device: torch.device
    slots: int
    host_slots: int = 0
    pinned_slots: int = 0

    def host_holds(self, manifest: Manifest) -> bool:
        """Return whether all experts of a store fit in host memory, so that they are read only
        once."""
        return self.host_slots == sum(layer.experts for layer in manifest.layers)


def why_not(manifest: Manifest) -> str:
    """Why the experts of a store cannot share one cache; empty if they can."""
    kinds = {
        (layer.shape(64), layer.interleaved, layer.gate_up_bias, layer.down_bias, layer.dtype)
        for layer in manifest.layers
    }
    return "" if len(kinds) == 1 else "its MoE layers have experts of different shapes"


def sizes_of(manifest: Manifest, bits: int, prefix_bits: int | None = None) -> SlotSizes:
    """Return the sizes of a store's experts in a cache.

    Args:
        bits: at most this many are read of an expert; 16 for whole ones.
        prefix_bits: of the prefixes that may be read instead; None for whole experts only.
    """
    experts = [layer.experts for layer in manifest.layers]
    grains_of = _grains_of(manifest, bits, prefix_bits)
    grains = [0] * (len(experts) * max(experts))
    prefixes = grains.copy()
    for index, layer in enumerate(manifest.layers):
        for expert in range(layer.experts):
            unit, own = index * max(experts) + expert, layer.bits_of(expert, bits)
            grains[unit] = grains_of[own]
            prefixes[unit] = grains_of[_prefix_bits(own, prefix_bits)]
    kinds = {grains: _expert_bytes(manifest, own) for own, grains in grains_of.items()}
    return SlotSizes(experts, kinds, grains, prefixes)


def least_slots(manifest: Manifest, bits: int, prefix_bits: int | None = None) -> int:
    """The fewest slots with which a cache works."""
    sizes = sizes_of(manifest, bits, prefix_bits)
    return sizes.experts_in(LEAST_SLOTS * max(sizes.kinds) - 1) + 1


def slot_bytes(manifest: Manifest, bits: int, prefix_bits: int | None = None) -> int:
    """Memory of one expert in a cache, its biases included; the mean if sizes differ."""
    sizes = sizes_of(manifest, bits, prefix_bits)
    if bits == WHOLE:
        own = _expert_bytes(manifest, bits)
    else:
        shape = manifest.layers[0].shape(manifest.group_size)
        own = grain_bytes(shape, _grains_of(manifest, bits, prefix_bits))
    biases = sum(_bias_bytes(manifest.layers[0]) / kind for kind in sizes.kinds)
    return ceil((own + biases) * sizes.all_grains / sum(sizes.experts))


def fixed_bytes(manifest: Manifest) -> int:
    """Memory in addition to the slots: the biases of all experts."""
    return sum(layer.experts * _bias_bytes(layer) for layer in manifest.layers)


def arena_for(
    manifest: Manifest,
    bits: int,
    slots: int,
    like: ExpertWeights,
    device: torch.device,
    prefix_bits: int | None = None,
) -> Arena:
    """Memory for ``slots`` experts of any layer, on average if sizes differ."""
    record, sizes = manifest.layers[0], sizes_of(manifest, bits, prefix_bits)
    shape, grains = record.shape(manifest.group_size), sizes.grains_for(slots)
    rows = sum(grains // kind for kind in sizes.kinds)
    first, second = (
        None if width is None else torch.zeros(rows, width, device=device)
        for width in _bias_widths(record)
    )
    own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
    own |= {"gate_up_bias_EG": first, "down_bias_EH": second}
    own["layer_experts"] = max(layer.experts for layer in manifest.layers)
    if bits == WHOLE:
        return whole_arena(shape, DTYPES[record.dtype], grains, device, **own)
    grains_of = _grains_of(manifest, bits, prefix_bits)
    return plane_arena(shape, grains_of, grains, record.interleaved, device, **own)


def _prefix_bits(own: int, prefix_bits: int | None) -> int:
    """Bits of an expert's prefix, or its own if it has fewer or is whole."""
    return own if prefix_bits is None or own == WHOLE else min(own, prefix_bits)


def _grains_of(manifest: Manifest, bits: int, prefix_bits: int | None) -> dict[int, int]:
    """Bits -> grains, of whole experts (the most frequent first), then of prefixes.

    An expert of b bits takes b grains, so two of 4 bits or four of 2 bits fit where one of 8 bits
    was. A grain is sized for the scales of the smallest expert, which wastes some percent of the
    larger ones. Grains are as large as the bits' common divisor allows, so experts of one size take
    one grain each.
    """
    counts = Counter(
        layer.bits_of(expert, bits) for layer in manifest.layers for expert in range(layer.experts)
    )
    whole = [own for own, _ in counts.most_common()]
    found = list(dict.fromkeys([*whole, *(_prefix_bits(own, prefix_bits) for own in whole)]))
    step = gcd(*found)
    return {own: own // step for own in found}


def _bias_bytes(record: MoELayerRecord) -> int:
    """Bytes of one expert's biases, in float32."""
    return 4 * sum(width or 0 for width in _bias_widths(record))


def _bias_widths(record: MoELayerRecord) -> tuple[int | None, int | None]:
    """G and H of the gate_up and down biases, None for an absent one."""
    return (
        None if record.gate_up_bias is None else record.parts * record.intermediate,
        None if record.down_bias is None else record.hidden,
    )


def _expert_bytes(manifest: Manifest, bits: int) -> int:
    """Bytes read for one expert of this many bits, without its biases."""
    record = manifest.layers[0]
    if bits != WHOLE:
        return record.shape(manifest.group_size).nbytes(bits)
    weights = record.hidden * record.intermediate * (record.parts + 1)
    return weights * DTYPES[record.dtype].itemsize
