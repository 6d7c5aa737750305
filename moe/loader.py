"""From a name and a profile to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kernels import Backend, BackendError, choose_backend, experts_forward
from kernels.reference import AnyExperts
from moe.errors import ProfileError
from moe.footprint import measure_footprint
from moe.fused import FUSED_OFF, Fused, enable_fused
from moe.linears import mend_linears
from moe.loading.hub import read_config, resolve_model
from moe.loading.load import LoadReport
from moe.loading.meta_model import build_meta_model
from moe.loading.progress import LoadProgress, Report, reporting
from moe.loading.quantized import decoding_notices
from moe.loading.weight_plan import DtypeFor, WeightPlan
from moe.machine import memory_available
from moe.moe_layer import MoELayers
from moe.packing import Packing, enable_packing
from moe.plan import MemoryPlan, check_fit, plan_memory, wave_tokens
from moe.profile import Profile
from moe.seam import attach, experts_modules
from moe.sources import open_source, total_bytes
from moe.takeover import precision_notices
from moe.text import TextCodec
from moe.trunk import Trunk
from routing import PolicyChain, RoutingError, parse_policies


@dataclass
class LoadedModel:
    """Everything that belongs to one loaded model.

    Attributes:
        trunk: the model without its experts.
        experts: its MoE layers.
        backend: what runs them.
        codec: tokenizer and vocabulary rules.
        packing: whether sequences share a forward pass, and why.
        fused: whether decode steps bypass transformers' forward, and why.
        memory_plan: what was planned before loading.
        weight_bytes: memory of all weights.
        logits_size: V of the logits (it can differ from the tokenizer's vocabulary).
        context_length: most tokens of a sequence, None where nothing limits it.
        notices: what fell back or was turned off, one sentence each.
    """

    trunk: Trunk
    experts: MoELayers
    backend: Backend
    codec: TextCodec
    packing: Packing
    fused: Fused
    memory_plan: MemoryPlan
    weight_bytes: int
    logits_size: int
    context_length: int | None
    notices: list[str] = field(default_factory=list)


def load_model(
    path_or_hub_id: str | Path,
    profile: Profile,
    *,
    progress: bool | Report = False,
    on_plan: Callable[[MemoryPlan], object] = lambda _: None,
) -> LoadedModel:
    """Load, take the experts over, and find out how the rest may run.

    Args:
        progress: see `moe.loading.progress.reporting`.
        on_plan: hears of the memory plan before it is checked and anything is read.

    Raises:
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.seam`.
        DoesNotFitError: the memory plan says so; nothing has been read.
        ProfileError: the device or the kernels' backend is absent, or a routing policy is not valid
            for this profile.
    """
    with reporting(progress) as report:
        report(LoadProgress("planning"))
        return _load(path_or_hub_id, profile, report, on_plan)


def _load(
    path_or_hub_id: str | Path,
    profile: Profile,
    report: Report,
    on_plan: Callable[[MemoryPlan], object],
) -> LoadedModel:
    policies = _policies(profile)
    device = _device(profile)
    if profile.threads is not None:
        torch.set_num_threads(profile.threads)
    path = resolve_model(path_or_hub_id)
    backend = _backend(profile, device)  # compiles kernels on their first use: no request waits
    config = read_config(path)
    network = build_meta_model(config, dtype=_trunk_dtype(profile, device))
    logits_size = network.get_output_embeddings().weight.shape[0]
    with open_source(path, config, network, profile.model, report) as source:
        weights = source.plan(_dtypes(network, profile, device))
        plan = _plan(network, weights, profile, device)
        on_plan(plan)
        check_fit(plan, profile)
        layers, loaded = source.load(weights, device, report)
    _check_backend(backend, layers)
    report(LoadProgress("preparing", weights.bytes_to_read, weights.bytes_to_read))
    experts = MoELayers(layers, policies, backend.forward)
    attach(network, experts.layers, experts.run)
    trunk = Trunk(network)
    packing = enable_packing(trunk)
    mended = mend_linears(network)
    fused = enable_fused(trunk, experts.run) if profile.engine.fused == "auto" else FUSED_OFF
    codec = TextCodec.from_directory(path, config)
    return LoadedModel(
        trunk=trunk,
        experts=experts,
        backend=backend,
        codec=codec,
        packing=packing,
        fused=fused,
        memory_plan=plan,
        weight_bytes=total_bytes(network, layers),
        logits_size=logits_size,
        context_length=_context_length(config, profile),
        notices=[
            *_notices(packing, fused, codec, loaded),
            *decoding_notices(config, profile.model.expert_bits),
            *precision_notices(network, layers, mended),
        ],
    )


def _plan(
    network: PreTrainedModel, weights: WeightPlan, profile: Profile, device: torch.device
) -> MemoryPlan:
    prefixes = tuple(f"{name}." for name, _ in experts_modules(network))
    experts = sum(size for name, size in weights.nbytes.items() if name.startswith(prefixes))
    context = _context_length(network.config, profile)
    wave = wave_tokens(profile)
    on_cuda = device.type == "cuda"
    return plan_memory(
        {"trunk": sum(weights.nbytes.values()) - experts, "experts": experts},
        measure_footprint(network, wave, min(context or wave, wave), on_cuda=on_cuda),
        profile,
        place=str(device) if on_cuda else "memory",
        available_bytes=torch.cuda.mem_get_info(device)[0] if on_cuda else memory_available(),
        context_length=context,
        logits_size=network.get_output_embeddings().weight.shape[0],
    )


def _policies(profile: Profile) -> PolicyChain:
    try:
        return parse_policies(profile.routing.policies, lossless=profile.lossless)
    except RoutingError as error:
        raise ProfileError(f"routing.policies: {error}") from error


def _backend(profile: Profile, device: torch.device) -> Backend:
    try:
        return choose_backend(profile.kernels.backend, device, experts_forward)
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}; or set it to auto") from error


def _check_backend(backend: Backend, layers: Sequence[AnyExperts]) -> None:
    try:
        backend.check(layers)
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}") from error


def _device(profile: Profile) -> torch.device:
    if profile.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if profile.device.startswith("cuda") and not torch.cuda.is_available():
        raise ProfileError(
            f"device is '{profile.device}', and torch finds no CUDA device on this machine; "
            "set device to cpu or auto"
        )
    return torch.device(profile.device)


def _trunk_dtype(profile: Profile, device: torch.device) -> torch.dtype | None:
    """What the trunk is kept in; None for the checkpoint's own dtype."""
    if profile.model.dtype != "auto":
        return _dtype(profile.model.dtype)
    return torch.float32 if device.type == "cpu" else None


def _dtypes(network: PreTrainedModel, profile: Profile, device: torch.device) -> DtypeFor:
    """Trunk weights become what arithmetic is fast in; experts stay as small as they came."""
    experts = tuple(f"{name}." for name, _ in experts_modules(network))
    trunk_dtype = _trunk_dtype(profile, device)

    def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        if not name.startswith(experts):
            return trunk_dtype or stored
        wanted = profile.model.expert_dtype
        return stored if wanted == "auto" else _dtype(wanted)

    return dtype_for


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _context_length(config: PreTrainedConfig, profile: Profile) -> int | None:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (own, profile.model.context_length) if limit is not None]
    return min(limits) if limits else None


def _notices(packing: Packing, fused: Fused, codec: TextCodec, report: LoadReport) -> list[str]:
    notices = []
    if not packing.enabled:
        notices.append(
            f"each sequence runs in a pass of its own and prompts are not cut: {packing.reason}"
        )
    if packing.enabled and not fused.enabled and fused is not FUSED_OFF:
        notices.append(f"decode steps run through transformers' own layers: {fused.reason}")
    if codec.tokenizer is None:
        notices.append(f"prompts can only be token ids: {codec.no_tokenizer_reason}")
    for names, what in (
        (report.ignored, "in the checkpoint are not used by this architecture"),
        (
            report.computed,
            "are not in the checkpoint and were filled by the architecture's own rule",
        ),
    ):
        if names:
            notices.append(f"{len(names)} tensors {what} (the first: {names[0]})")
    return notices
