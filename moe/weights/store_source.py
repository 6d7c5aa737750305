"""A store as the source of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from experts.header import DTYPES
from experts.layer_file import WHOLE
from experts.manifest import Manifest
from experts.store import Store
from kernels import ExpertWeights
from kernels.reference import AnyExperts
from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint, listing
from moe.loading.load import LoadReport
from moe.loading.progress import LoadProgress, Report
from moe.loading.store import (
    check_orders,
    expert_parameters,
    layer_faults,
    plan_exactly,
    read_layers,
    stored_bits,
)
from moe.loading.weight_plan import DtypeFor, WeightPlan, plan_weights
from moe.plan.memory import Offloadable
from moe.seam import take_experts
from moe.settings import ModelSettings, OffloadSettings
from moe.weights.linears import chosen_linears, quantize_linear
from moe.weights.takeover import Takeover, keep_layer
from offload.capacity import Capacity, fixed_bytes, least_slots, slot_bytes, why_not
from offload.errors import OffloadError
from offload.offloaded import Offloaded
from offload.opening import open_offloaded


class StoreSource:
    """A store made by ``moe convert``: its linear layers are planes before they are filled."""

    def __init__(
        self,
        network: PreTrainedModel,
        store: Store,
        trunk: Checkpoint,
        settings: ModelSettings,
        offload: OffloadSettings,
    ) -> None:
        self._network, self._store, self._trunk = network, store, trunk
        self._offload = offload
        self._settings = settings
        manifest = store.manifest
        self._linears = stored_bits(store, settings, network)
        faults = layer_faults(manifest.layers, network)
        faults += [
            f"{name} is stored as planes, and the configuration has no such linear layer"
            for name in self._linears.keys() - chosen_linears(network, 8, 8).keys()
        ]
        if faults:
            title = f"the store {store.directory} does not fit {type(network).__name__}"
            raise CheckpointError(listing(title, faults))
        bits = settings.expert_bits or manifest.bits
        holds_planes = manifest.bits < WHOLE or manifest.linears
        group_size = manifest.group_size if holds_planes else settings.group_size
        update = {"group_size": group_size, "expert_bits": bits}
        self._settings = settings.model_copy(update=update)
        self._read_bits = bits if manifest.bits < WHOLE else WHOLE
        self._late_bits = offload.late_bits if offload.late == "prefix" else None

    def plan(self, dtype_for: DtypeFor) -> WeightPlan:
        trial = copy.deepcopy(self._network)  # which stays as transformers made it until `load`
        takeover = self._quantize_linears(trial)
        dtype_for = takeover.dtype_for(dtype_for)
        weights = plan_weights(trial, self._trunk, dtype_for, plan_exactly)
        whole = {
            name: parameter.numel() * dtype_for(name, dtype).itemsize
            for name, parameter, dtype in expert_parameters(self._store, trial)
        }
        experts = self._store.layer_bytes(self._read_bits)
        return replace(
            weights,
            nbytes=takeover.nbytes(weights.nbytes | whole) | self._allotted(),
            bytes_to_read=weights.bytes_to_read + experts,
        )

    def _allotted(self) -> dict[str, int]:
        """Memory of the layers whose experts have different bits, as `Takeover.nbytes` names it."""
        manifest = self._store.manifest
        return {
            f"{layer.module}.{'gate_up_proj' if layer.parts == 2 else 'up_proj'}": sum(
                layer.shape(manifest.group_size).nbytes(layer.bits_of(expert, self._read_bits))
                for expert in range(layer.experts)
            )
            for layer in manifest.layers
            if layer.bits is not None
        }

    def offloadable(self) -> Offloadable | str:
        manifest, bits, late = self._store.manifest, self._read_bits, self._late_bits
        reason = why_not(manifest)
        if not reason and bits == WHOLE and not _keeps_whole(self._settings, manifest):
            reason = (
                "it has whole weights, which the profile changes while they are loaded: leave "
                "model.expert_bits and model.expert_dtype as they are stored, or convert again"
            )
        if reason:
            return f"the experts of this store cannot stay on disk: {reason}"
        experts = sum(layer.experts for layer in manifest.layers)
        size, fixed = slot_bytes(manifest, bits, late), fixed_bytes(manifest)
        return Offloadable(experts, size, least_slots(manifest, bits, late), fixed)

    def load(
        self, weights: WeightPlan, device: torch.device, report: Report, room: Capacity | None
    ) -> tuple[list[AnyExperts] | Offloaded, LoadReport]:
        takeover = self._quantize_linears(self._network)
        like = take_experts(self._network)
        experts = self._store.layer_bytes(self._read_bits)
        if room is not None and not room.host_holds(self._store.manifest):
            weights = replace(weights, bytes_to_read=weights.bytes_to_read - experts)
        loaded = takeover.load(self._trunk, weights, device, report)
        total = weights.bytes_to_read
        done = total - experts

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(LoadProgress("loading weights", done, total))

        if room is not None:
            return self._open_offloaded(like, room, advance), loaded

        def keep(layer: AnyExperts) -> AnyExperts:
            return keep_layer(self._settings, layer)

        check = self._settings.check_finite
        layers = read_layers(self._store, like, self._read_bits, keep, device, advance, check)
        return layers, loaded

    def _open_offloaded(
        self, like: Sequence[ExpertWeights], room: Capacity, advance: Callable[[int], object]
    ) -> Offloaded:
        check_orders(self._store, like, self._read_bits)
        try:
            return open_offloaded(
                self._store.directory,
                like,
                self._read_bits,
                room,
                policy=self._offload.policy,
                reader=self._offload.reader,
                keep_hot_set=self._offload.hot_set,
                late=self._offload.late == "host",
                late_bits=self._late_bits,
                advance=advance,
            )
        except OffloadError as error:
            raise CheckpointError(str(error)) from error

    def _quantize_linears(self, network: PreTrainedModel) -> Takeover:
        """Make the linear layers that are stored as planes; what happens to the others."""
        for name, bits in self._linears.items():
            quantize_linear(network, name, self._settings.group_size, bits)
        return Takeover(network, self._settings, lambda _, layer: layer)


def _keeps_whole(settings: ModelSettings, manifest: Manifest) -> bool:
    """Whether whole weights stay as they are stored."""
    stored = {DTYPES[layer.dtype] for layer in manifest.layers}
    wanted = settings.expert_dtype
    return settings.expert_bits == WHOLE and (
        wanted == "auto" or stored == {getattr(torch, wanted)}
    )
