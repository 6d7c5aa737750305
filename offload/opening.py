"""From a store to `Offloaded`: what may stay on disk, what it takes in memory, how it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experts.header import DTYPES
from experts.layer_file import WHOLE
from experts.manifest import LayerRecord, Manifest
from experts.store import Store
from kernels import ExpertWeights
from kernels.planes import num_planes
from kernels.reference import AnyExperts
from offload.arena import PAGE, Arena, plane_arena, whole_arena
from offload.cache import ExpertCache
from offload.disk import DiskSource, read_biases
from offload.experts import OffloadedExperts
from offload.hot_set import hot_set_file, load_hot_set
from offload.offloaded import Offloaded
from offload.policies import POLICIES, Policy
from offload.readers import choose_reader


def why_not(manifest: Manifest) -> str:
    """Why the experts of a store cannot share one cache; empty where they can."""
    kinds = {
        (layer.shape(64), layer.interleaved, layer.gate_up_bias, layer.down_bias, layer.dtype)
        for layer in manifest.layers
    }
    return "" if len(kinds) == 1 else "its MoE layers have experts of different shapes"


def slot_bytes(manifest: Manifest, bits: int) -> int:
    """Memory of one expert in a cache on a CPU, its biases included."""
    record = manifest.layers[0]
    if bits == WHOLE:
        own = _whole_bytes(record)
    else:
        own = -(-record.shape(manifest.group_size).nbytes(bits) // PAGE) * PAGE
    return own + _bias_bytes(record)


def fixed_bytes(manifest: Manifest) -> int:
    """Memory beside the slots: the biases of all experts."""
    return sum(layer.experts * _bias_bytes(layer) for layer in manifest.layers)


def open_offloaded(
    directory: Path,
    like: Sequence[ExpertWeights],
    bits: int,
    slots: int,
    *,
    policy: str,
    reader: str,
    keep_hot_set: bool,
) -> Offloaded:
    """The experts of a store, of which ``slots`` are in memory at a time.

    Args:
        directory: the store; its files stay open.
        like: the architecture's own experts of each layer, on meta.
        bits: of the experts; 16 for whole ones.
        policy: which experts are worth keeping; a name in `offload.policies`.
        reader: see `offload.readers.choose_reader`.
        keep_hot_set: read the experts first that were worth keeping at the end of the last run.

    Raises:
        StoreError: the store is damaged.
        BudgetError: too few slots.
        OffloadError: its files cannot be read.
    """
    with ExitStack() as closing:
        store = closing.enter_context(Store.open(directory))
        manifest = store.manifest
        counts = [layer.experts for layer in manifest.layers]
        chosen = choose_reader(store.file(0).path, reader)
        closing.callback(chosen.close)
        arena = _arena(manifest, bits, sum(counts), like[0])
        views = _views(arena.experts, like)
        biases = [read_biases(store, layer) for layer in range(len(counts))]
        source = DiskSource(store, bits, chosen, arena, biases)
        made: Policy = POLICIES[policy](len(counts), max(counts))
        cache = ExpertCache(counts, slots, arena, source, made, _plane_bytes(manifest, bits))
        layers = [
            OffloadedExperts(index, count, cache, view)
            for index, (count, view) in enumerate(zip(counts, views, strict=True))
        ]
        file = hot_set_file(directory) if keep_hot_set else None
        if file is not None:
            cache.warm(load_hot_set(file, counts))
        return Offloaded(layers, cache, chosen, file, closing.pop_all())


def _arena(manifest: Manifest, bits: int, slots: int, like: ExpertWeights) -> Arena:
    """Room for ``slots`` experts of any layer."""
    record = manifest.layers[0]
    shape = record.shape(manifest.group_size)
    first, second = (
        None if width is None else torch.zeros(slots, width) for width in _bias_widths(record)
    )
    own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
    own |= {"gate_up_bias_EG": first, "down_bias_EH": second}
    if bits == WHOLE:
        return whole_arena(shape, DTYPES[record.dtype], slots, **own)
    return plane_arena(shape, bits, slots, record.interleaved, **own)


def _bias_bytes(record: LayerRecord) -> int:
    """Of one expert, in float32."""
    return 4 * sum(width or 0 for width in _bias_widths(record))


def _bias_widths(record: LayerRecord) -> tuple[int | None, int | None]:
    """G and H of the biases that there are."""
    return (
        None if record.gate_up_bias is None else record.parts * record.intermediate,
        None if record.down_bias is None else record.hidden,
    )


def _plane_bytes(manifest: Manifest, bits: int) -> list[int]:
    """Bytes of each plane of an expert, of plane 0 with the scales; one number for whole ones."""
    if bits == WHOLE:
        return [_whole_bytes(manifest.layers[0])]
    shape = manifest.layers[0].shape(manifest.group_size)
    first, *others = map(shape.plane_bytes, range(num_planes(bits)))
    return [2 * shape.num_scales + first, *others]


def _whole_bytes(record: LayerRecord) -> int:
    weights = record.hidden * record.intermediate * (record.parts + 1)
    return weights * DTYPES[record.dtype].itemsize


def _views(slots: AnyExperts, like: Sequence[ExpertWeights]) -> list[AnyExperts]:
    """The slots with each layer's own functions; one object for layers that compute the same, as
    kernels keep a table of addresses for each."""
    views: list[AnyExperts] = []
    for layer in like:
        same = (
            view
            for view in [slots, *views]
            if view.post_norm is layer.post_norm is None and _agree(view, layer)
        )
        own = next(same, None)
        functions: dict[str, Any] = {"activation": layer.activation, "post_norm": layer.post_norm}
        views.append(replace(slots, **functions) if own is None else own)
    return views


def _agree(view: AnyExperts, layer: ExpertWeights) -> bool:
    """Whether the activations are one function, tried on rows from tiny to huge."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(64, layer.gate_up_EGH.shape[1], generator=random)
    rows *= torch.logspace(-3, 3, 64)[:, None]
    return torch.equal(view.activation(rows), layer.activation(rows))
