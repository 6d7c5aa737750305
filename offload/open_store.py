"""Open a store as `Offloaded`: its experts on disk, behind caches in one or two memory tiers.

On a CPU, one cache in main memory is filled from disk (`DiskSource`). A GPU has a cache of its own,
filled from a cache in host memory (`HostSource`), filled from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from experts.layer_file import WHOLE
from experts.safetensors_io import DTYPES, pread_exactly
from experts.store import Store, StoreError
from experts.weights import ExpertKey, is_finite
from kernels import ExpertWeights, QuantizedExperts
from kernels.reference import AnyExperts
from offload.arena import Arena
from offload.cache import ExpertCache
from offload.capacity import Capacity, arena_for, sizes_of
from offload.cpu_experts import CpuExperts, measure_costs
from offload.errors import OffloadError
from offload.host_tier import HostSource
from offload.hot_set import HotSet, hot_set_file, load_hot_set
from offload.layer import OffloadedExperts
from offload.offloaded import HOST, MEMORY, SLOWEST, HostPolicy, Offloaded, Tier
from offload.policies import EvictionPolicy, make_policy
from offload.readers import choose_reader
from offload.slots import SlotSizes
from offload.streams import Streams, open_streams
from offload.transfer import Read, Reader, Transfer
from offload.trials import SpeedTrial, try_now


def open_offloaded(
    directory: Path,
    like: Sequence[ExpertWeights],
    bits: int,
    room: Capacity,
    *,
    policy: str,
    reader: str,
    keep_hot_set: bool,
    reads_ahead: bool = False,
    cpu_row_bits: Literal[8, 24] | None = None,
    prefix_bits: int | None = None,
    drafts: bool = True,
    check_finite: bool = False,
    advance: Callable[[int], object] = lambda _: None,
    trial: SpeedTrial = try_now,
) -> Offloaded:
    """The experts of a store, of which caches hold some at a time.

    Args:
        directory: the store; its files stay open.
        like: the architecture's own experts of each layer, on meta.
        bits: of the experts; 16 for whole ones.
        room: how many experts fit in which memory.
        policy: eviction policy; a name in `offload.policies.POLICIES`.
        reader: see `offload.readers.choose_reader`.
        keep_hot_set: begin with the experts that the last run found most valuable, and save them.
        reads_ahead: see `offload.layer.read_ahead`.
        cpu_row_bits: let the CPU compute experts that a GPU lacks, if that is faster than copying
            them, on activations of so many bits (`QuantizedExperts.row_bits`); None: never.
        prefix_bits: of the prefixes that may be read, see `Offloaded.serve_prefixes`; None for
            whole experts only.
        drafts: see `Store.open`.
        check_finite: refuse experts that hold NaN or infinity, each when it is first read.
        advance: called with the bytes read while host memory is filled with the whole store.
        trial: measures the disk and the processor, or knows how fast they were.

    Raises:
        StoreError: the store is damaged.
        BudgetError: too few slots.
        OffloadError: its files cannot be read, or, with ``check_finite``, biases hold NaN or
            infinity.
    """
    with ExitStack() as closing:
        store = closing.enter_context(Store.open(directory, drafts=drafts))
        records = store.manifest.layers
        counts = [layer.experts for layer in records]
        chosen = choose_reader(store.file(0).path, reader, trial)
        closing.callback(chosen.close)
        made = make_policy(policy, len(counts), max(counts))
        opening = _Opening(store, bits, prefix_bits, like, chosen, made, reads_ahead, check_finite)
        file = hot_set_file(directory) if keep_hot_set else None
        hot_set = [] if file is None else load_hot_set(file, counts)
        streams = open_streams(room.device)
        if streams is None:
            layers, tiers = opening.in_memory(room)
            tiers[0].cache.warm(hot_set)
            load_seconds = tiers[0].cache.expert_bytes / max(chosen.bytes_per_second, SLOWEST)
        else:
            layers, tiers, load_seconds = opening.over_host(
                room, streams, closing, cpu_row_bits, trial
            )
            device, host = tiers
            _fill(device, host, opening.sizes, hot_set, advance)
        kept = [[record.bits_of(e, bits) for e in range(record.experts)] for record in records]
        return Offloaded(layers, tiers, kept, chosen, load_seconds, file, closing.pop_all())


class _Opening:
    """Builds the tiers of a store."""

    def __init__(
        self,
        store: Store,
        bits: int,
        prefix_bits: int | None,
        like: Sequence[ExpertWeights],
        reader: Reader,
        policy: EvictionPolicy,
        reads_ahead: bool,
        check_finite: bool,
    ) -> None:
        self._store, self._bits, self._prefix_bits, self._like = store, bits, prefix_bits, like
        self._reader, self._policy, self._reads_ahead = reader, policy, reads_ahead
        self._check_finite = check_finite
        self._counts = [layer.experts for layer in store.manifest.layers]
        self.sizes = sizes_of(store.manifest, bits, prefix_bits)
        layers = range(len(self._counts))
        self._biases = [read_biases(store, layer, check_finite) for layer in layers]

    def in_memory(self, room: Capacity) -> tuple[list[OffloadedExperts], list[Tier]]:
        """One tier over the disk."""
        arena = self._arena(sum(self._counts), room.device)
        cache = self._over_disk(arena, room.slots, self._policy)
        views = enumerate(zip(self._counts, _views(arena.experts, self._like), strict=True))
        layers = [
            OffloadedExperts(layer, count, cache, view, reads_ahead=self._reads_ahead)
            for layer, (count, view) in views
        ]
        return layers, [Tier(MEMORY, cache)]

    def over_host(
        self,
        room: Capacity,
        streams: Streams,
        closing: ExitStack,
        cpu_row_bits: Literal[8, 24] | None,
        trial: SpeedTrial,
    ) -> tuple[list[OffloadedExperts], list[Tier], float]:
        """A device over host memory over the disk.

        Args:
            closing: unpins the memory that is pinned here.

        Returns:
            The layers; the tiers; the seconds that loading a missing expert takes.
        """
        arena = self._arena(room.slots, room.device)
        near = self._arena(room.host_slots, torch.device("cpu"))
        for piece in near.pin(self.sizes.grains_for(room.pinned_slots), streams.pin):
            closing.callback(streams.unpin, piece)
        values = HostPolicy(self._policy, lambda: cache.present)
        host = self._over_disk(near, room.host_slots, values)
        copies = HostSource(host, near, arena, streams)
        closing.callback(copies.close)
        cache = ExpertCache(self.sizes, room.slots, arena, copies, self._policy)
        seconds = copies.copy_seconds()
        near_slots, costs = near.experts, None
        if isinstance(near_slots, QuantizedExperts) and cpu_row_bits is not None:
            near_slots = replace(near_slots, row_bits=cpu_row_bits)
        views = _views(arena.experts, self._like), _views(near_slots, self._like)
        if cpu_row_bits is not None:
            costs = measure_costs(near, views[1][0], seconds, trial)
        layers = []
        for layer, (count, view, host_view) in enumerate(zip(self._counts, *views, strict=True)):
            own = None
            if costs is not None:
                own = CpuExperts(layer, host, host_view, costs)
            made = OffloadedExperts(
                layer, count, cache, view, copies, own, reads_ahead=self._reads_ahead
            )
            layers.append(made)
        if not room.host_holds(self._store.manifest):
            seconds = cache.expert_bytes / max(self._reader.bytes_per_second, SLOWEST)
        return layers, [Tier(str(room.device), cache), Tier(HOST, host)], seconds

    def _arena(self, slots: int, device: torch.device) -> Arena:
        manifest, like = self._store.manifest, self._like[0]
        return arena_for(manifest, self._bits, slots, like, device, self._prefix_bits)

    def _over_disk(self, arena: Arena, slots: int, policy: EvictionPolicy) -> ExpertCache:
        source = DiskSource(
            self._store, self._bits, self._reader, arena, self._biases, self._check_finite
        )
        return ExpertCache(self.sizes, slots, arena, source, policy)


def _fill(
    device: Tier, host: Tier, sizes: SlotSizes, hot_set: HotSet, advance: Callable[[int], object]
) -> None:
    """Read all experts into host memory if they fit, else those of the hot set."""
    width = max(sizes.experts)
    if host.cache.slots == sum(sizes.experts):
        units = np.flatnonzero(sizes.grains).tolist()
        units.sort(key=lambda unit: -sizes.grains[unit])  # else they would not all fit
        for start in range(0, len(units), width):
            some = units[start : start + width]
            host.cache.warm(divmod(unit, width) for unit in some)
            advance(sum(sizes.nbytes[unit] for unit in some))
    device.cache.warm(hot_set)
    host.cache.warm(hot_set)


def _views(slots: AnyExperts, like: Sequence[ExpertWeights]) -> list[AnyExperts]:
    """The slots with each layer's own functions. Layers that compute the same share one object,
    because kernels keep a table of addresses for each object."""
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
    """Return whether two activations agree, tested on rows from tiny to huge."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(64, layer.gate_up_EGH.shape[1], generator=random)
    rows *= torch.logspace(-3, 3, 64)[:, None]
    return torch.equal(view.activation(rows), layer.activation(rows))


CHECKED_EVERY = 64
"""Reads for each one that is checked, beside the first of each expert: that costs less than 1 %."""


class DiskSource:
    """Fills slots of main memory from a store; see `offload.slot_manager.ExpertSource`.

    Compares the checksums of each expert when it is read for the first time, and sometimes later;
    then it also looks for NaN and infinity, if asked.

    Args:
        store: stays open as long as this is used.
        bits: of the experts; 16 for whole ones.
        reader: reads the store's files.
        arena: the slots' memory.
        biases: of each layer.
        check_finite: refuse experts that hold NaN or infinity.
    """

    def __init__(
        self,
        store: Store,
        bits: int,
        reader: Reader,
        arena: Arena,
        biases: Sequence[Biases],
        check_finite: bool = False,
    ) -> None:
        self._store = store
        self._starts = [
            [store.prefix(ExpertKey(at, expert), bits).start for expert in range(layer.experts)]
            for at, layer in enumerate(store.manifest.layers)
        ]
        self._bits, self._check_finite = bits, check_finite
        self._reader, self._arena, self._biases = reader, arena, biases
        self._checked: dict[ExpertKey, int] = {}  # so many bytes of it
        self._since = 0
        self._places: dict[int, list[Tensor]] = {}  # of slots; making them takes time

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Transfer:
        file, places = self._store.file(layer), self._places.get(slot)
        if places is None:
            places = self._places[slot] = self._arena.places(slot)
        reads, offset = [], self._starts[layer][expert]
        for place in places:
            reads.append(Read(file.fd, file.path, offset, place, file.status))
            offset += place.numel()
        biases, slots = self._biases[layer], self._arena.experts
        if biases.gate_up_EG is not None and slots.gate_up_bias_EG is not None:
            slots.gate_up_bias_EG[slot] = biases.gate_up_EG[expert]
        if biases.down_EH is not None and slots.down_bias_EH is not None:
            slots.down_bias_EH[slot] = biases.down_EH[expert]
        what = f"expert {expert} of MoE layer {layer}"
        transfer: Transfer = self._reader.submit(reads, urgent=urgent, what=what)
        key = ExpertKey(layer, expert)
        self._since += 1
        num_bytes = offset - self._starts[layer][expert]
        if self._checked.get(key, 0) >= num_bytes and self._since < CHECKED_EVERY:
            return transfer
        self._since = 0
        return CheckedTransfer(transfer, partial(self._check, key, places, num_bytes))

    def _check(self, key: ExpertKey, places: Sequence[Tensor], num_bytes: int) -> None:
        self._store.check(key, self._bits, places)
        if self._check_finite and not all(map(is_finite, self._numbers(key, places))):
            raise StoreError(
                f"expert {key.expert} of {self._store.manifest.layers[key.layer].module} in "
                f"{self._store.file(key.layer).path} holds NaN or infinity"
            )
        self._checked[key] = max(num_bytes, self._checked.get(key, 0))

    def _numbers(self, key: ExpertKey, places: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of an expert that can hold NaN: whole weights, or scales, which come
        first."""
        if self._bits == WHOLE:
            dtype = DTYPES[self._store.manifest.layers[key.layer].dtype]
            return [place.view(dtype) for place in places]
        scales = self._store.blob(key, "scales")
        return [places[0][: scales.nbytes].view(scales.dtype)]


class CheckedTransfer:
    """A transfer that has failed if its bytes are not those that were written; see `Transfer`.

    Args:
        transfer: reads the bytes.
        check: called once, when they are there; raises `StoreError` if they are wrong.
    """

    def __init__(self, transfer: Transfer, check: Callable[[], None]) -> None:
        self._transfer, self._check = transfer, check
        self._is_checked = False
        self._damage: OffloadError | None = None

    @property
    def done(self) -> bool:
        return self._transfer.done

    @property
    def failed(self) -> Exception | None:
        if self._transfer.done and self._transfer.failed is None and not self._is_checked:
            self._is_checked = True
            try:
                self._check()
            except StoreError as error:
                self._damage = OffloadError(str(error))
        return self._transfer.failed or self._damage

    def wait(self) -> float:
        seconds = self._transfer.wait()
        if self.failed is not None:
            raise self.failed
        return seconds

    def cancel(self) -> bool:
        return self._transfer.cancel()

    def hasten(self) -> None:
        self._transfer.hasten()


@dataclass(frozen=True)
class Biases:
    """The biases of a layer's experts, which stay in memory: they are too small to read one by one.

    Attributes:
        gate_up_EG, down_EH: float32 on the CPU, or None.
    """

    gate_up_EG: Tensor | None
    down_EH: Tensor | None


def read_biases(store: Store, layer: int, check_finite: bool = False) -> Biases:
    """Raises `OffloadError` if the file cannot be read, or, with ``check_finite``, naming a bias
    that holds NaN or infinity."""
    file = store.file(layer)

    def read(name: str) -> Tensor | None:
        info = file.tensors.get(f"layers.{layer}.{name}")
        if info is None:
            return None
        raw = bytearray(info.nbytes)
        try:
            got = pread_exactly(file.fd, memoryview(raw), info.start)
        except OSError as error:
            raise OffloadError(f"cannot read {file.path}: {error.strerror}") from error
        if got != info.nbytes:
            raise OffloadError(f"{file.path} ended early: it was truncated after it was opened")
        bias = torch.frombuffer(raw, dtype=info.dtype).view(info.shape).float()
        if check_finite and not is_finite(bias):
            module = store.manifest.layers[layer].module
            raise OffloadError(f"{name} of {module} in {file.path} holds NaN or infinity")
        return bias

    return Biases(read("gate_up_bias"), read("down_bias"))
