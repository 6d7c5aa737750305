"""From a store to `Offloaded`: what may stay on disk, what it takes in memory, how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from offload.host import HostSource
from offload.hot_set import HotSet, hot_set_file, load_hot_set
from offload.offloaded import Offloaded
from offload.policies import POLICIES, Policy
from offload.readers import choose_reader
from offload.streams import open_streams
from offload.tiers import HOST, MEMORY, HostValues, Tier


@dataclass(frozen=True)
class Room:
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
    room: Room,
    *,
    policy: str,
    reader: str,
    keep_hot_set: bool,
    advance: Callable[[int], object] = lambda _: None,
) -> Offloaded:
    """The experts of a store, of which some are in memory at a time.

    Args:
        directory: the store; its files stay open.
        like: the architecture's own experts of each layer, on meta.
        bits: of the experts; 16 for whole ones.
        room: for how many there is room where.
        policy: which experts are worth keeping; a name in `offload.policies`.
        reader: see `offload.readers.choose_reader`.
        keep_hot_set: read the experts first that were worth keeping at the end of the last run.
        advance: hears of bytes read, where host memory takes all of the store.

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
        biases = [read_biases(store, layer) for layer in range(len(counts))]
        made: Policy = POLICIES[policy](len(counts), max(counts))
        file = hot_set_file(directory) if keep_hot_set else None
        hot_set = [] if file is None else load_hot_set(file, counts)
        planes, streams = _plane_bytes(manifest, bits), open_streams(room.device)

        def filled_from_disk(arena: Arena, slots: int, policy: Policy) -> ExpertCache:
            source = DiskSource(store, bits, chosen, arena, biases)
            return ExpertCache(counts, slots, arena, source, policy, planes)

        copies: HostSource | None = None
        if streams is None:
            arena = _arena(manifest, bits, sum(counts), like[0], room.device)
            tiers = [Tier(MEMORY, filled_from_disk(arena, room.slots, made))]
            tiers[0].cache.warm(hot_set)
        else:
            arena = _arena(manifest, bits, room.slots, like[0], room.device)
            near = _arena(manifest, bits, room.host_slots, like[0], torch.device("cpu"))
            for piece in near.pin(room.pinned_slots, streams.pin):
                closing.callback(streams.unpin, piece)
            values = HostValues(made)
            host = filled_from_disk(near, room.host_slots, values)
            copies = HostSource(host, near, arena, streams)
            values.device = ExpertCache(counts, room.slots, arena, copies, made, planes)
            tiers = [Tier(str(room.device), values.device), Tier(HOST, host)]
            _fill(*tiers, counts=counts, hot_set=hot_set, advance=advance)
        views = _views(arena.experts, like)
        layers = [
            OffloadedExperts(index, count, tiers[0].cache, view, copies)
            for index, (count, view) in enumerate(zip(counts, views, strict=True))
        ]
        return Offloaded(layers, tiers, chosen, file, closing.pop_all())


def _fill(
    device: Tier,
    host: Tier,
    *,
    counts: Sequence[int],
    hot_set: HotSet,
    advance: Callable[[int], object],
) -> None:
    """Read all experts if host memory takes them, else those of the hot set."""
    if host.cache.slots == sum(counts):
        for layer, count in enumerate(counts):
            host.cache.warm((layer, expert) for expert in range(count))
            advance(count * host.cache.expert_bytes)
    device.cache.warm(hot_set)
    host.cache.warm(hot_set)


def _arena(
    manifest: Manifest, bits: int, slots: int, like: ExpertWeights, device: torch.device
) -> Arena:
    """Room for ``slots`` experts of any layer."""
    record = manifest.layers[0]
    shape = record.shape(manifest.group_size)
    first, second = (
        None if width is None else torch.zeros(slots, width, device=device)
        for width in _bias_widths(record)
    )
    own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
    own |= {"gate_up_bias_EG": first, "down_bias_EH": second}
    if bits == WHOLE:
        return whole_arena(shape, DTYPES[record.dtype], slots, device, **own)
    return plane_arena(shape, bits, slots, record.interleaved, device, **own)


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
