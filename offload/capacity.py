"""What experts of a store take in memory, tier by tier, and the memory itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import torch

from experts.manifest import Manifest, MoELayerRecord
from experts.safetensors_io import DTYPES
from experts.store import WHOLE
from kernels import ExpertWeights
from offload.arena import Arena, grain_bytes, plane_arena, whole_arena
from offload.cache import LEAST_SLOTS
from offload.slots import Sizes


@dataclass(frozen=True)
class Capacity:
    """For how many experts there is room, and where.

    Attributes:
        device: where kernels run.
        slots: there.
        host_slots: in host memory, for a device that is not a CPU.
        pinned_slots: of those, how many may be page-locked.
    """

    device: torch.device
    slots: int
    host_slots: int = 0
    pinned_slots: int = 0

    def host_holds(self, manifest: Manifest) -> bool:
        """Whether host memory takes all experts of a store, which are read once then."""
        return self.host_slots == sum(layer.experts for layer in manifest.layers)


def why_not(manifest: Manifest) -> str:
    """Why the experts of a store cannot share one cache; empty where they can."""
    kinds = {
        (layer.shape(64), layer.interleaved, layer.gate_up_bias, layer.down_bias, layer.dtype)
        for layer in manifest.layers
    }
    return "" if len(kinds) == 1 else "its MoE layers have experts of different shapes"


def sizes_of(manifest: Manifest, bits: int, late_bits: int | None = None) -> Sizes:
    """Of the experts of a store, read at so many bits or less.

    Args:
        late_bits: of a prefix, where one may be read of an expert instead.
    """
    experts = [layer.experts for layer in manifest.layers]
    grains_of = _grains_of(manifest, bits, late_bits)
    grains = [0] * (len(experts) * max(experts))
    prefixes = grains.copy()
    for index, layer in enumerate(manifest.layers):
        for expert in range(layer.experts):
            unit, own = index * max(experts) + expert, layer.bits_of(expert, bits)
            grains[unit] = grains_of[own]
            prefixes[unit] = grains_of[_prefix_bits(own, late_bits)]
    kinds = {grains: _expert_bytes(manifest, own) for own, grains in grains_of.items()}
    return Sizes(experts, kinds, grains, prefixes)


def least_slots(manifest: Manifest, bits: int, late_bits: int | None = None) -> int:
    """The fewest with which a cache can work."""
    sizes = sizes_of(manifest, bits, late_bits)
    return sizes.experts_in(LEAST_SLOTS * max(sizes.kinds) - 1) + 1


def slot_bytes(manifest: Manifest, bits: int, late_bits: int | None = None) -> int:
    """Memory of one expert in a cache, its biases included; the mean where sizes differ."""
    sizes = sizes_of(manifest, bits, late_bits)
    if bits == WHOLE:
        own = _expert_bytes(manifest, bits)
    else:
        shape = manifest.layers[0].shape(manifest.group_size)
        own = grain_bytes(shape, _grains_of(manifest, bits, late_bits))
    biases = sum(_bias_bytes(manifest.layers[0]) / kind for kind in sizes.kinds)
    return ceil((own + biases) * sizes.all_grains / sum(sizes.experts))


def fixed_bytes(manifest: Manifest) -> int:
    """Memory beside the slots: the biases of all experts."""
    return sum(layer.experts * _bias_bytes(layer) for layer in manifest.layers)


def arena_for(
    manifest: Manifest,
    bits: int,
    slots: int,
    like: ExpertWeights,
    device: torch.device,
    late_bits: int | None = None,
) -> Arena:
    """Memory of ``slots`` experts of any layer, on average where sizes differ."""
    record, sizes = manifest.layers[0], sizes_of(manifest, bits, late_bits)
    shape, grains = record.shape(manifest.group_size), sizes.grains_for(slots)
    rows = sum(grains // kind for kind in sizes.kinds)
    first, second = (
        None if width is None else torch.zeros(rows, width, device=device)
        for width in _bias_widths(record)
    )
    own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
    own |= {"gate_up_bias_EG": first, "down_bias_EH": second}
    if bits == WHOLE:
        return whole_arena(shape, DTYPES[record.dtype], grains, device, **own)
    grains_of = _grains_of(manifest, bits, late_bits)
    return plane_arena(shape, grains_of, grains, record.interleaved, device, **own)


def _prefix_bits(own: int, late_bits: int | None) -> int:
    """Of an expert of so many bits, if no more than its prefix is read."""
    return own if late_bits is None or own == WHOLE else min(own, late_bits)


def _grains_of(manifest: Manifest, bits: int, late_bits: int | None) -> dict[int, int]:
    """The bits that experts have, those of most of them first, then those that only prefixes have,
    and the grains that these take.

    An expert of b bits takes b grains, so that two of 4 bits or four of 2 fit where one of 8 was;
    scales are counted with the fewest bits, which wastes some percent of the others. Where that can
    be had with larger grains they are larger, and experts of one size take one each.
    """
    counts = Counter(
        layer.bits_of(expert, bits) for layer in manifest.layers for expert in range(layer.experts)
    )
    whole = [own for own, _ in counts.most_common()]
    found = list(dict.fromkeys([*whole, *(_prefix_bits(own, late_bits) for own in whole)]))
    step = gcd(*found)
    return {own: own // step for own in found}


def _bias_bytes(record: MoELayerRecord) -> int:
    """Of one expert, in float32."""
    return 4 * sum(width or 0 for width in _bias_widths(record))


def _bias_widths(record: MoELayerRecord) -> tuple[int | None, int | None]:
    """G and H of the biases that there are."""
    return (
        None if record.gate_up_bias is None else record.parts * record.intermediate,
        None if record.down_bias is None else record.hidden,
    )


def _expert_bytes(manifest: Manifest, bits: int) -> int:
    """Of one expert of so many bits as it is read, without its biases."""
    record = manifest.layers[0]
    if bits != WHOLE:
        return record.shape(manifest.group_size).nbytes(bits)
    weights = record.hidden * record.intermediate * (record.parts + 1)
    return weights * DTYPES[record.dtype].itemsize
