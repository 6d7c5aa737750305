"""Load a model from a store: nothing is converted, its bytes are read to where they stay.

`StoreSource` is what `moe.loading.sources.open_source` gives for a store. Its linear layers become
planes before they are filled; its experts are read layer by layer (`read_layers`), or stay on disk
behind caches (`offload.open_store`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experts.layer_file import WHOLE
from experts.linear import QuantizedLinear
from experts.manifest import MTP_MODULE, TRUNK_NAME, Manifest, MoELayerRecord, StoreError
from experts.safetensors_io import DTYPES, TensorInfo
from experts.store import Store
from experts.weights import is_finite, is_interleaved
from kernels import ExpertWeights
from kernels.reference import AnyExperts
from moe.cache_dir.trials import Trials
from moe.errors import CheckpointError, ProfileError, listing
from moe.loading.checkpoint import Checkpoint
from moe.loading.load import DtypeFor, LoadReport, WeightPlan, plan_weights
from moe.loading.memory_plan import Offloadable
from moe.loading.plan import Index, LoadPlan, WeightConversion, adjusted, without_tied
from moe.loading.progress import LoadProgress, Report
from moe.loading.takeover import Takeover, chosen_linears, keep_layer, quantize_linear
from moe.model_lock import on_device
from moe.network.seam import expert_shape, experts_modules, take_experts
from moe.settings import ModelSettings, OffloadSettings
from offload.capacity import Capacity, fixed_bytes, least_slots, slot_bytes, why_not
from offload.errors import OffloadError
from offload.layer import MissingExperts
from offload.offloaded import Offloaded
from offload.open_store import open_offloaded

READERS = 4
"""Threads that read: this many requests at a time fill the disks that we measured."""
CPU_ROW_BITS: dict[str, Literal[8, 24]] = {"host": 24, "host_int8": 8}
"""Bits of the activations that the CPU multiplies, by ``offload.late``."""


class StoreSource:
    """A store made by ``moe convert``: its linear layers are planes before they are filled."""

    def __init__(
        self,
        network: PreTrainedModel,
        store: Store,
        trunk: Checkpoint,
        settings: ModelSettings,
        offload: OffloadSettings,
        missing: MissingExperts | None,
        no_mtp: str,
    ) -> None:
        self._network, self._store, self._trunk = network, store, trunk
        self.no_mtp = no_mtp
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
        self._prefix_bits = None if missing is None else missing.bits

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
        manifest, bits, prefix = self._store.manifest, self._read_bits, self._prefix_bits
        reason = why_not(manifest)
        if not reason and bits == WHOLE and not _keeps_whole(self._settings, manifest):
            reason = (
                "it has whole weights, which the profile changes while they are loaded: leave "
                "model.expert_bits and model.expert_dtype as they are stored, or convert again"
            )
        if reason:
            return f"the experts of this store cannot stay on disk: {reason}"
        experts = sum(layer.experts for layer in manifest.layers)
        size, fixed = slot_bytes(manifest, bits, prefix), fixed_bytes(manifest)
        return Offloadable(experts, size, least_slots(manifest, bits, prefix), fixed)

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
                reads_ahead=self._offload.prefetch,
                cpu_row_bits=CPU_ROW_BITS.get(self._offload.late),
                prefix_bits=self._prefix_bits,
                drafts=not self.no_mtp,
                check_finite=self._settings.check_finite,
                advance=advance,
                trial=Trials(self._settings.proof_cache).figures,
            )
        except OffloadError as error:
            raise CheckpointError(str(error)) from error

    def _quantize_linears(self, network: PreTrainedModel) -> Takeover:
        """Make the linear layers that are stored as planes; what happens to the others."""
        for name, bits in self._linears.items():
            quantize_linear(network, name, self._settings.group_size, bits)
        return Takeover(network, self._settings, lambda _, layer: layer)


@contextmanager
def open_store(path: Path, *, verify: bool, report: Report, drafts: bool = True) -> Iterator[Store]:
    """Open and check a store. What is wrong with it comes out as `CheckpointError`.

    Args:
        drafts: see `Store.open`.
    """
    try:
        with Store.open(path, drafts=drafts) as store:
            if verify:
                _verify(store, report)
            yield store
            store.verify_unchanged()
    except StoreError as error:
        raise CheckpointError(str(error)) from error


def _verify(store: Store, report: Report) -> None:
    total = sum(record.nbytes for record in store.manifest.files.values())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(LoadProgress("verifying", done, total))

    store.verify(advance)


def open_trunk(store: Store) -> Checkpoint:
    return Checkpoint.open(store.directory, [TRUNK_NAME])


def stored_bits(store: Store, settings: ModelSettings, network: PreTrainedModel) -> dict[str, int]:
    """Bits to be read of each linear layer that is stored as planes.

    Raises:
        ProfileError: the profile asks for more bits, of these or of the experts, than there are.
    """
    manifest = store.manifest
    _at_most("model.expert_bits", settings.expert_bits, manifest.bits, store)
    modules = {id(module): name for name, module in network.named_modules()}
    head = modules.get(id(network.get_output_embeddings()))
    bits: dict[str, int] = {}
    for name, most in manifest.linears.items():
        key, wanted = "trunk_bits", settings.trunk_bits
        if name == head:
            key, wanted = "head_bits", settings.head_bits
        _at_most(f"model.{key}", wanted, most, store)
        bits[name] = wanted or most
    return bits


def _at_most(key: str, wanted: int | None, most: int, store: Store) -> None:
    if wanted is not None and wanted > most:
        raise ProfileError(
            f"{key} is {wanted}, and the store {store.directory} holds {most} bits; "
            f"set it to {most} or less, or to null, or convert the model again with more bits"
        )


def plan_exactly(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> LoadPlan:
    """Every tensor of a trunk to the parameter of its name; experts are not among them."""
    experts = {f"{name}.{w}" for name, m in experts_modules(model) for w in m._parameters}
    expected = {name: t for name, t in model.state_dict().items() if name not in experts}
    spare = [  # planes that the profile does not want
        f"{name}.plane" for name, m in model.named_modules() if isinstance(m, QuantizedLinear)
    ]
    if MTP_MODULE not in model._modules:
        spare.append(f"{MTP_MODULE}.")
    problems, conversions = [], []
    for name, tensor in tensors.items():
        if name not in expected:
            if not name.startswith(tuple(spare)):
                problems.append(f"unexpected: {name} {tensor.shape}")
            continue
        wanted = expected[name]
        if wanted.shape != tensor.shape or (
            wanted.is_floating_point() != tensor.dtype.is_floating_point
        ):
            problems.append(
                f"wrong shape or dtype: {name} is {tensor.shape} {tensor.dtype}, the configuration "
                f"says {tuple(wanted.shape)} {wanted.dtype}"
            )
        else:
            pieces: list[tuple[str, Index]] = [(name, ())]
            conversions.append(
                WeightConversion(name, None, {name: [name]}, {name: wanted.shape}, pieces)
            )
    missing = expected.keys() - tensors.keys()
    absent = adjusted(model, without_tied(model, missing), set()).missing_keys
    problems += [f"missing: {name}" for name in sorted(absent)]
    return LoadPlan(conversions, missing, [], problems)


def layer_faults(records: Sequence[MoELayerRecord], network: PreTrainedModel) -> list[str]:
    """Return where the layers of a store are not those of the network."""
    modules = experts_modules(network)
    if len(records) != len(modules):
        return [f"{len(records)} MoE layers, the configuration says {len(modules)}"]
    faults = []
    for record, (name, module) in zip(records, modules, strict=True):
        own = expert_shape(module, 64)
        stored = (record.module, record.experts, record.shape(64), record.gate_up_bias is not None)
        if stored != (name, module.num_experts, own, bool(module.has_bias)):
            faults.append(
                f"{record.file}: {record.module} with {record.experts} experts, hidden "
                f"{record.hidden}, intermediate {record.intermediate}; the configuration says "
                f"{name} with {module.num_experts}, {own.hidden}, {own.intermediate}"
            )
    return faults


def expert_parameters(
    store: Store, network: PreTrainedModel
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Name, shape on meta and stored dtype of every parameter of the network's experts."""
    records = store.manifest.layers
    for record, (name, module) in zip(records, experts_modules(network), strict=True):
        biases = {
            ("gate_up_proj" if module.has_gate else "up_proj") + "_bias": record.gate_up_bias,
            "down_proj_bias": record.down_bias,
        }
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{own}", parameter, DTYPES[biases.get(own) or record.dtype]


def read_layers(
    store: Store,
    like: Sequence[ExpertWeights],
    bits: int,
    keep: Callable[[AnyExperts], AnyExperts],
    device: torch.device,
    advance: Callable[[int], object],
    check_finite: bool = False,
) -> list[AnyExperts]:
    """The first ``bits`` of every layer; ``advance`` is told each number of bytes read.

    Raises `CheckpointError` for a layer that cannot be read, or, with ``check_finite``, naming all
    that hold NaN or infinity.
    """
    check_orders(store, like, bits)
    lock, bad = threading.Lock(), set()

    def count(nbytes: int) -> None:
        with lock:
            advance(nbytes)

    def one(index: int) -> AnyExperts:
        with on_device(device):
            layer = store.load_layer(index, bits, like[index], device, count)
            if check_finite and not all(map(is_finite, _numbers(layer))):
                bad.add(index)
            return keep(layer)

    with ThreadPoolExecutor(READERS) as pool:
        layers = list(pool.map(one, range(len(like))))
    if bad:
        records = (store.manifest.layers[index] for index in sorted(bad))
        faults = [f"{record.module} in {record.file} holds NaN or infinity" for record in records]
        raise CheckpointError(listing(f"bad values in {store.directory}", faults))
    return layers


def _numbers(layer: AnyExperts) -> Iterator[Tensor]:
    """The tensors of a layer that can hold NaN: codes cannot."""
    if isinstance(layer, ExpertWeights):
        yield from (layer.gate_up_EGH, layer.down_EHF)
    else:
        yield from layer.scales
    yield from (b for b in (layer.gate_up_bias_EG, layer.down_bias_EH) if b is not None)


def check_orders(store: Store, like: Sequence[ExpertWeights], bits: int) -> None:
    """Raise `CheckpointError` where gate and up are not as the architecture's activation wants."""
    for record, layer in zip(store.manifest.layers, like, strict=True):
        if bits == WHOLE or record.parts == 1:
            continue
        if is_interleaved(layer.activation, record.intermediate) != record.interleaved:
            raise CheckpointError(
                f"{store.directory / record.file}: gate and up of {record.module} are not in the "
                "order of this architecture's activation; convert the model again"
            )


def _keeps_whole(settings: ModelSettings, manifest: Manifest) -> bool:
    """Return whether whole weights stay as they are stored."""
    stored = {DTYPES[layer.dtype] for layer in manifest.layers}
    wanted = settings.expert_dtype
    return settings.expert_bits == WHOLE and (
        wanted == "auto" or stored == {getattr(torch, wanted)}
    )
