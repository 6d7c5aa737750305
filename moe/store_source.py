"""A store as the source of a model's weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from experts.layer_file import WHOLE
from experts.store import Store
from kernels.reference import AnyExperts
from moe.errors import CheckpointError
from moe.linears import chosen_linears, quantize_linear
from moe.loading.checkpoint import Checkpoint, listing
from moe.loading.load import LoadReport, load_weights
from moe.loading.progress import LoadProgress, Report
from moe.loading.store import (
    expert_parameters,
    layer_faults,
    plan_exactly,
    read_layers,
    stored_bits,
)
from moe.loading.weight_plan import DtypeFor, WeightPlan, plan_weights
from moe.seam import take_experts
from moe.settings import ModelSettings
from moe.takeover import Takeover, keep_layer


class StoreSource:
    """A store made by ``moe convert``: its linear layers are planes before they are filled."""

    def __init__(
        self, network: PreTrainedModel, store: Store, trunk: Checkpoint, settings: ModelSettings
    ) -> None:
        self._network, self._store, self._trunk = network, store, trunk
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
            nbytes=takeover.nbytes(weights.nbytes | whole),
            bytes_to_read=weights.bytes_to_read + experts,
        )

    def load(
        self, weights: WeightPlan, device: torch.device, report: Report
    ) -> tuple[list[AnyExperts], LoadReport]:
        takeover = self._quantize_linears(self._network)
        like = take_experts(self._network)
        loaded = load_weights(
            self._network,
            self._trunk,
            weights,
            device=device,
            report=report,
            check_finite=self._settings.check_finite,
            modules=takeover.modules,
            complete=takeover,
        )
        takeover.finish()
        total = weights.bytes_to_read
        done = total - self._store.layer_bytes(self._read_bits)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(LoadProgress("loading weights", done, total))

        def keep(layer: AnyExperts) -> AnyExperts:
            return keep_layer(self._settings, layer)

        layers = read_layers(self._store, like, self._read_bits, keep, device, advance)
        return layers, loaded

    def _quantize_linears(self, network: PreTrainedModel) -> Takeover:
        """Make the linear layers that are stored as planes; what happens to the others."""
        for name, bits in self._linears.items():
            quantize_linear(network, name, self._settings.group_size, bits)
        return Takeover(network, self._settings, lambda _, layer: layer)
