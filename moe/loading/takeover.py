"""Replace modules of a transformers model by ours, each as soon as its weights are there.

Experts leave the model; linear layers become planes where the profile says so. Routers and gates
(as wide as there are experts, or one) stay whole, as do norms, embeddings and everything that is
not exactly a `torch.nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experts.layer_file import WHOLE
from experts.linear import QuantizedLinear
from experts.weights import quantize_experts
from kernels import ExpertWeights, QuantizedExperts, arrange_experts
from kernels.planes import PREFIX_BITS, PlaneLayout, PrefixBits
from kernels.reference import AnyExperts
from moe.errors import CheckpointError, listing
from moe.loading.checkpoint import Checkpoint
from moe.loading.load import DtypeFor, LoadReport, WeightPlan, load_weights
from moe.loading.own_planes import OwnPlanes, OwnReader
from moe.loading.progress import LoadProgress, Report
from moe.network.seam import expert_shape, experts_modules, routing_modules, take_weights
from moe.settings import ModelSettings
from offload.layer import LayerExperts, held_experts

Keep = Callable[[int, AnyExperts], AnyExperts | None]
"""Chooses the weights of an MoE layer that stay in memory: whole ones, or the checkpoint's own
codes."""


class Takeover:
    """Changes the modules of a network while it is loaded.

    Args:
        network: on meta.
        settings: at how many bits weights are kept.
        keep: what is kept of each MoE layer.

    Attributes:
        layers: what was kept, by MoE layer.
        own: modules that keep the checkpoint's own codes. Set them before `nbytes` and `load`.
    """

    def __init__(self, network: PreTrainedModel, settings: ModelSettings, keep: Keep) -> None:
        self.network = network
        self.layers: dict[int, AnyExperts] = {}
        self.own = OwnPlanes()
        self._settings = settings
        self._keep = keep
        self._experts = {name: i for i, (name, _) in enumerate(experts_modules(network))}
        self._linears = chosen_linears(network, settings.trunk_bits, settings.head_bits)

    def dtype_for(self, base: DtypeFor) -> DtypeFor:
        """Return the dtype in which a weight is read: one that is quantized is read as it is
        stored, and so rounded once, not twice."""
        weights = {f"{name}.weight" for name in self._linears}
        experts = tuple(f"{name}." for name in self._experts)

        def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
            quantized = name in weights or (
                quantizes(self._settings.expert_bits) and name.startswith(experts)
            )
            return stored if quantized else base(name, stored)

        return dtype_for

    def nbytes(self, whole: Mapping[str, int]) -> dict[str, int]:
        """Memory of each parameter after the takeover, from that of whole ones."""
        sizes, group_size = dict(whole), self._settings.group_size
        for name, bits in self._linears.items():
            layout = linear_layout(self.network.get_submodule(name), group_size)
            sizes[f"{name}.weight"] = layout.nbytes(bits)
        wanted = self._settings.expert_bits
        if wanted is not None and quantizes(wanted):
            for name, module in experts_modules(self.network):
                one = expert_shape(module, group_size).nbytes(wanted)
                first = "gate_up_proj" if module.has_gate else "up_proj"
                sizes[f"{name}.{first}"] = module.num_experts * one
                sizes[f"{name}.down_proj"] = 0
        return sizes | self.own.nbytes(self.network)

    def __call__(self, name: str) -> None:
        """The weights of this module are complete. Raises `CheckpointError` where they are bad."""
        try:
            if name in self._experts:
                self._take(name, take_weights(self.network.get_submodule(name)))
            else:
                bits = self._linears.pop(name)
                quantize_linear(self.network, name, self._settings.group_size, bits)
        except ValueError as error:
            raise CheckpointError(f"{name} cannot be quantized: {error}") from error

    def _take(self, name: str, experts: AnyExperts) -> None:
        index = self._experts[name]
        kept = self._keep(index, experts)
        if kept is not None:
            self.layers[index] = kept

    def load(
        self, checkpoint: Checkpoint, weights: WeightPlan, device: torch.device, report: Report
    ) -> LoadReport:
        """Fill the network, each module's weights together, and take it over when it is full."""
        done, total = 0, weights.bytes_to_read

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(LoadProgress("loading weights", done, total))

        check, experts = self._settings.check_finite, self._experts
        own = OwnReader(self.own, self.network, checkpoint, weights.dtypes, device, check, advance)
        for name in (name for name in self.own.experts if name in experts):
            if self.network.get_submodule(name)._parameters:  # else it is in the store already
                self._take(name, own.read_experts(name))
        own.read_tables()
        if own.not_finite:
            raise CheckpointError(listing(f"bad values in {checkpoint.path}", own.not_finite))
        rest = self.own.without(weights, checkpoint)
        loaded = load_weights(
            self.network,
            checkpoint,
            rest,
            device=device,
            report=lambda now: report(
                replace(now, done_bytes=done + now.done_bytes, total_bytes=total)
            ),
            check_finite=check,
            modules=(experts.keys() - self.own.experts.keys()) | self._linears.keys(),
            complete=self,
        )
        for name in list(self._linears):  # tied to others
            self(name)
        return loaded


def precision_notices(
    network: nn.Module, layers: Sequence[LayerExperts], mended: Sequence[str]
) -> list[str]:
    """Say what is quantized, and what was meant to be and is not."""
    notices = []
    held = map(held_experts, layers)
    bits = {
        layer.bits_of(expert)
        for layer in held
        if isinstance(layer, QuantizedExperts)
        for expert in range(layer.num_experts)
    }
    linears = planes_of(network).values()
    if bits:
        widths = " or ".join(str(width) for width in sorted(bits))
        notices.append(f"experts run at {widths} bits")
    if linears:
        widths = " and ".join(str(width) for width in sorted(set(linears)))
        notices.append(f"{len(linears)} linear layers of the trunk run at {widths} bits")
    if mended:
        notices.append(
            f"{len(mended)} linear layers were made whole again, as the architecture reads their "
            f"weights without calling them (the first: {mended[0]})"
        )
    return notices


def arrange_linears(network: nn.Module, device: torch.device) -> None:
    """Arrange the bit planes of all linear layers for the device, one after the other."""
    for module in network.modules():
        if isinstance(module, QuantizedLinear):
            module.arrange(device)


def keep_layer(settings: ModelSettings, layer: AnyExperts) -> AnyExperts:
    """A layer at the precision of the settings; planes are arranged for the device they are on."""
    bits = settings.expert_bits
    if isinstance(layer, ExpertWeights) and bits is not None and quantizes(bits):
        layer = quantize_experts(layer, settings.group_size, bits)
    if isinstance(layer, QuantizedExperts):
        return arrange_experts(layer)
    if settings.expert_dtype == "auto":
        return layer
    names = ("gate_up_EGH", "down_EHF", "gate_up_bias_EG", "down_bias_EH")
    dtype = getattr(torch, settings.expert_dtype)
    own = {name: getattr(layer, name) for name in names}
    return replace(layer, **{name: t.to(dtype) for name, t in own.items() if t is not None})


def quantizes(bits: int | None) -> bool:
    """Return whether a setting of bits asks for planes."""
    return bits is not None and bits < WHOLE


def linear_layout(linear: nn.Module, group_size: int) -> PlaneLayout:
    assert isinstance(linear, nn.Linear)
    return PlaneLayout(linear.out_features, linear.in_features, group_size)


def chosen_linears(
    network: PreTrainedModel, trunk_bits: int | None, head_bits: int | None
) -> dict[str, int]:
    """Linear layers to be quantized, by name, and their bits."""
    head = network.get_output_embeddings()
    routing = dict(routing_modules(network))
    chosen = {}
    for name, module in network.named_modules():
        bits = head_bits if module is head else trunk_bits
        if type(module) is not nn.Linear or bits is None or not quantizes(bits):
            continue
        if module is head or name not in routing:
            chosen[name] = bits
    return chosen


def quantize_linear(network: PreTrainedModel, name: str, group_size: int, bits: int) -> None:
    """Replace one linear layer of the network; one on meta gets no values."""
    linear = network.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    dtype = network.config.dtype
    assert isinstance(dtype, torch.dtype)
    replaced: Any = QuantizedLinear.of(linear, group_size, bits, dtype)
    replaced._is_hf_initialized = True  # transformers asks every module
    network.set_submodule(name, replaced)
    tied = network.all_tied_weights_keys
    for target in [t for t, source in tied.items() if f"{name}.weight" in (t, source)]:
        del tied[target]


def planes_of(network: nn.Module) -> dict[str, int]:
    """Bits of the linear layers that are planes, by name."""
    return {
        name: module.bits
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def prefixes_of(network: nn.Module) -> dict[str, PrefixBits]:
    """Bits of the linear layers that we have quantised ourselves, by name: these have prefixes."""
    found: dict[str, PrefixBits] = {}
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear) and module.layout.scales == "symmetric":
            found[name] = PREFIX_BITS[PREFIX_BITS.index(module.bits)]
    return found


def mend_linears(network: nn.Module) -> list[str]:
    """Dequantise the layers whose weight the architecture reads without calling them; their names.

    Call it after a probe has run the network. Such a layer gives right results as it is, but each
    read dequantises the whole weight again.
    """
    found = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear) and module.reads
    }
    for name, module in found.items():
        network.set_submodule(name, module.whole())
    return list(found)
