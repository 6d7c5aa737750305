"""From a name and a profile to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kernels import Backend, BackendError, choose_backend, experts_forward
from moe.calibrate.foresight import Expect, expectation, foresee, look_ahead
from moe.device import use_device
from moe.engine.borrowing import borrowing_notice
from moe.errors import ProfileError
from moe.freed_memory import keep_freed_memory
from moe.fused.enable import FUSED_OFF, Fused, enable_fused
from moe.loaded import LoadedModel
from moe.loading.generation_config import OwnSampling
from moe.loading.hub import resolve_model
from moe.loading.progress import LoadProgress, Report, reporting
from moe.loading.quantized import decoding_notices
from moe.moe_layer import MoELayers
from moe.notices import late_notices, notices
from moe.packing import Packing, enable_packing
from moe.plan.fit import check_fit
from moe.plan.memory import MemoryPlan
from moe.plan.planning import planning
from moe.policing import prepare
from moe.profile import Profile
from moe.row_wise import make_row_wise
from moe.sampling.constraint import Structures
from moe.seam import attach
from moe.speculate import Speculation, enable_speculation
from moe.speculate.contrast import enable_contrast
from moe.text.prompts import TextCodec
from moe.trunk import Trunk
from moe.weights.linears import mend_linears
from moe.weights.sources import total_bytes
from moe.weights.takeover import precision_notices
from offload.experts import LayerExperts, held_experts
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import PolicyChain, RoutingError, parse_policies


def load_model(
    path_or_hub_id: str | Path,
    profile: Profile,
    ranks: int = 1,
    *,
    progress: bool | Report = False,
    on_plan: Callable[[MemoryPlan], object] = lambda _: None,
) -> LoadedModel:
    """Load, take the experts over, and find out how the rest may run.

    Args:
        ranks: how many share the experts; each has room for its part of them.
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
        return _load(path_or_hub_id, profile, ranks, report, on_plan)


def _load(
    path_or_hub_id: str | Path,
    profile: Profile,
    ranks: int,
    report: Report,
    on_plan: Callable[[MemoryPlan], object],
) -> LoadedModel:
    policies = _policies(profile)
    device = use_device(profile)
    path = resolve_model(path_or_hub_id)
    backend = _backend(profile, device)  # compiles kernels on their first use: no request waits
    with planning(path, profile, device, report, ranks) as planned:
        network, weights, plan = planned.network, planned.weights, planned.memory
        on_plan(plan)
        check_fit(plan, profile, planned.why_resident)
        # before the weights: what is wrong with small files is not to be heard of minutes later
        codec = TextCodec.from_directory(path, planned.config)
        sampling = OwnSampling.from_directory(path)
        made, loaded = planned.source.load(weights, device, report, planned.room)
    offloaded = made if isinstance(made, Offloaded) else None
    if profile.memory.keep_freed and offloaded is None and device.type == "cpu":
        keep_freed_memory()
    layers: Sequence[LayerExperts] = made.layers if isinstance(made, Offloaded) else made
    _check_backend(backend, layers)
    report(LoadProgress("preparing", weights.bytes_to_read, weights.bytes_to_read))
    prefetcher, expect, blind = _look_ahead(offloaded, layers, path, planned.config, profile)
    experts = MoELayers(layers, backend.forward, prefetcher)
    attach(network, experts.layers, experts.run)
    trunk = Trunk(network)
    make_row_wise(trunk)
    ready = _make_ready(trunk, experts, policies, profile)
    if offloaded is not None and profile.offload.late == "prefix":
        offloaded.serve_prefixes(profile.offload.late_share)  # as policies: after the probes
    return LoadedModel(
        trunk=ready.trunk,
        experts=experts,
        backend=backend,
        codec=codec,
        structures=Structures(codec, planned.logits_size),
        packing=ready.packing,
        fused=ready.fused,
        speculation=ready.speculation,
        memory_plan=plan,
        weight_bytes=total_bytes(network, layers),
        logits_size=planned.logits_size,
        context_length=planned.context_length,
        offloaded=offloaded,
        expect=expect,
        sampling=sampling,
        notices=[
            *sampling.notices,
            *notices(ready.packing, ready.fused, codec, loaded),
            *ready.speculation.notices,
            *decoding_notices(planned.config, profile.model.expert_bits),
            *precision_notices(network, layers, ready.mended),
            *filter(None, [*blind, borrowing_notice(offloaded, profile)]),
            *late_notices(offloaded, profile),
        ],
    )


def _look_ahead(
    offloaded: Offloaded | None,
    layers: Sequence[LayerExperts],
    path: Path,
    config: PreTrainedConfig,
    profile: Profile,
) -> tuple[Prefetcher | None, Expect | None, list[str]]:
    """To read experts that will be needed, and to group requests by what they will need; why not,
    where that is wanted."""
    prefetcher, foresight, learning = None, "", ""
    if offloaded is not None:
        for layer in offloaded.layers:
            layer.ahead = profile.offload.prefetch
        drafts = profile.speculation.mode in ("auto", "elastic")
        prefetcher, foresight = look_ahead(offloaded, path, config, profile.offload, drafts=drafts)
        learning = foresee(offloaded, path, config, profile.offload)
    expect, apart = None, ""
    if profile.engine.overlap_patience:
        expect, apart = expectation(path, config, [layer.num_experts for layer in layers])
    return prefetcher, expect, [foresight, learning, apart]


@dataclass(frozen=True)
class _Ready:
    """How a loaded model runs; ``mended``: see `moe.weights.linears.mend_linears`."""

    trunk: Trunk
    packing: Packing
    mended: list[str]
    fused: Fused
    speculation: Speculation


def _make_ready(
    trunk: Trunk, experts: MoELayers, policies: PolicyChain, profile: Profile
) -> _Ready:
    """Find out which faster ways the model can go, and let its policies decide from then on."""
    packing = enable_packing(trunk)
    mended = mend_linears(trunk.model)
    fused = enable_fused(trunk, experts) if profile.engine.fused == "auto" else FUSED_OFF
    speculation = enable_speculation(profile.speculation, trunk, experts, experts.forward)
    # Policies come after the probes, which compare ways to compute the model as it is.
    experts.selectors = prepare(policies, trunk)
    experts.policies = policies
    enable_contrast(profile.speculation, trunk, experts)
    return _Ready(trunk, packing, mended, fused, speculation)


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


def _check_backend(backend: Backend, layers: Sequence[LayerExperts]) -> None:
    try:
        backend.check([held_experts(layer) for layer in layers])
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}") from error
