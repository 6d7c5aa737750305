"""From a store to `Offloaded`: its experts behind as many tiers as the device has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experts.store import Store
from kernels import ExpertWeights
from kernels.reference import AnyExperts
from offload.arena import Arena
from offload.cache import ExpertCache
from offload.disk import DiskSource, read_biases
from offload.experts import OffloadedExperts
from offload.host import HostSource
from offload.hot_set import HotSet, hot_set_file, load_hot_set
from offload.offloaded import SLOWEST, Offloaded
from offload.policies import POLICIES, Policy
from offload.readers import choose_reader
from offload.room import Room, arena_for, plane_bytes
from offload.streams import open_streams
from offload.tiers import HOST, MEMORY, HostValues, Tier


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
        planes, streams = plane_bytes(manifest, bits), open_streams(room.device)

        def filled_from_disk(arena: Arena, slots: int, policy: Policy) -> ExpertCache:
            source = DiskSource(store, bits, chosen, arena, biases)
            return ExpertCache(counts, slots, arena, source, policy, planes)

        copies: HostSource | None = None
        load_seconds = sum(planes) / max(chosen.bytes_per_second, SLOWEST)
        if streams is None:
            arena = arena_for(manifest, bits, sum(counts), like[0], room.device)
            tiers = [Tier(MEMORY, filled_from_disk(arena, room.slots, made))]
            tiers[0].cache.warm(hot_set)
        else:
            arena = arena_for(manifest, bits, room.slots, like[0], room.device)
            near = arena_for(manifest, bits, room.host_slots, like[0], torch.device("cpu"))
            for piece in near.pin(room.pinned_slots, streams.pin):
                closing.callback(streams.unpin, piece)
            values = HostValues(made)
            host = filled_from_disk(near, room.host_slots, values)
            copies = HostSource(host, near, arena, streams)
            if room.host_holds(manifest):
                load_seconds = copies.copy_seconds()
            values.device = ExpertCache(counts, room.slots, arena, copies, made, planes)
            tiers = [Tier(str(room.device), values.device), Tier(HOST, host)]
            _fill(*tiers, counts=counts, hot_set=hot_set, advance=advance)
        views = _views(arena.experts, like)
        layers = [
            OffloadedExperts(index, count, tiers[0].cache, view, copies)
            for index, (count, view) in enumerate(zip(counts, views, strict=True))
        ]
        return Offloaded(layers, tiers, chosen, load_seconds, file, closing.pop_all())


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
