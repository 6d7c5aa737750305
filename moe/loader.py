"""From a name and a profile to a model that is ready to run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kernels import Backend, BackendError, choose_backend, experts_forward
from moe.calibration.foresight import Expect, expectation, look_ahead
from moe.decode.enable import FUSED_OFF, Fused, enable_fused
from moe.describe.probe import Packing, enable_packing
from moe.describe.routers import enable_policies
from moe.describe.row_wise import make_row_wise
from moe.engine.borrowing import borrowing_notice
from moe.errors import ProfileError
from moe.loading.hub import resolve_model
from moe.loading.load import LoadReport
from moe.loading.memory_plan import MemoryPlan
from moe.loading.progress import LoadProgress, Report, reporting
from moe.loading.quantized import decoding_notices
from moe.loading.sources import total_bytes
from moe.loading.takeover import mend_linears, precision_notices
from moe.memory.planning import check_fit, planning
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.seam import attach
from moe.sampling.constraint import Structures
from moe.settings.device import use_device
from moe.settings.profile import Profile
from moe.speculate import Speculation, enable_speculation
from moe.speculate.contrast import enable_contrast
from moe.text.generation_config import OwnSampling
from moe.text.tokenizer import TextCodec
from offload.layer import LayerExperts, held_experts
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import PolicyChain, RoutingError, parse_policies

# ---- A loaded model, as a value: what `moe.loader` makes and the rest of `moe` runs.


@dataclass
class LoadedModel:
    """Everything that belongs to one loaded model.

    Attributes:
        backbone: the model without its experts.
        experts: its MoE layers.
        backend: what runs them.
        codec: tokenizer and vocabulary rules.
        structures: what a request may want its text to be like.
        packing: whether sequences share a forward pass, and why.
        fused: whether decode steps bypass transformers' forward, and why.
        speculation: what drafts tokens for the model to verify, if anything does.
        memory_plan: what was planned before loading.
        weight_bytes: memory of all weights.
        logits_size: V of the logits (it can differ from the tokenizer's vocabulary).
        context_length: most tokens of a sequence, None where nothing limits it.
        offloaded: the experts that are not all in memory; None where they are.
        expect: what a prompt needs, where requests may be grouped by it.
        sampling: how the model itself wants its tokens sampled.
        notices: what fell back or was turned off, one sentence each.
    """

    backbone: Backbone
    experts: MoELayers
    backend: Backend
    codec: TextCodec
    structures: Structures
    packing: Packing
    fused: Fused
    speculation: Speculation
    memory_plan: MemoryPlan
    weight_bytes: int
    logits_size: int
    context_length: int | None
    offloaded: Offloaded | None
    expect: Expect | None = None
    sampling: OwnSampling = field(default_factory=OwnSampling)
    notices: list[str] = field(default_factory=list)


# ---- What fell back or changes nothing, and why: one sentence each, for whoever loads a model.


def low_bit_notices(offloaded: Offloaded | None, profile: Profile) -> list[str]:
    bits = profile.offload.late_bits
    if profile.offload.late != "prefix" or (offloaded is not None and offloaded.cache.prefixed):
        return []
    if offloaded is None:
        return ["offload.late: prefix changes nothing: all experts are in memory"]
    return [
        f"offload.late: prefix changes nothing: no expert has more than {bits} bits "
        "(offload.late_bits)"
    ]


def load_notices(packing: Packing, fused: Fused, codec: TextCodec, report: LoadReport) -> list[str]:
    made = []
    if not packing.enabled:
        made.append(
            "each sequence runs in a pass of its own, and prompts are neither cut nor kept for "
            f"others that begin alike: {packing.reason}"
        )
    if packing.enabled and not fused.enabled and fused is not FUSED_OFF:
        made.append(f"decode steps run through transformers' own layers: {fused.reason}")
    if codec.tokenizer is None:
        made.append(f"prompts can only be token ids: {codec.no_tokenizer_reason}")
    for names, what in (
        (report.ignored, "in the checkpoint are not used by this architecture"),
        (
            report.computed,
            "are not in the checkpoint and were filled by the architecture's own rule",
        ),
    ):
        if names:
            made.append(f"{len(names)} tensors {what} (the first: {names[0]})")
    return made


# ---- Telling glibc to keep what is freed for the next who asks.
#
# By itself it gives every large block back to the system when it is freed. A pass over thousands
# of tokens makes and drops blocks of tens of megabytes in every layer, and then takes a page
# fault for each of their pages again: a tenth of the processor time of reading a long prompt
# (docs/results/2026-11-21-prefill.md).

KEPT = 2**30
"""Bytes at the end of the heap that may stay with the process while nobody uses them."""
_STEP = 2**28
"""Bytes by which the heap grows at least."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names of mallopt(3), from malloc.h


def keep_freed_memory() -> bool:
    """Take large blocks from the heap of this process from now on; False without glibc.

    Concerns every allocation of the process. What was allocated before stays where it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function, or no such library
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in ((_TRIM_THRESHOLD, KEPT), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    )


def give_back_freed_memory() -> None:
    """Let the system have what is kept, also between blocks in use; nothing without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


# ----


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
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.network.seam`.
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
    backbone = Backbone(network)
    make_row_wise(backbone)
    ready = _make_ready(backbone, experts, policies, profile)
    if offloaded is not None and profile.offload.late == "prefix":
        offloaded.serve_prefixes(profile.offload.late_share)  # as policies: after the probes
    return LoadedModel(
        backbone=ready.backbone,
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
            *load_notices(ready.packing, ready.fused, codec, loaded),
            *ready.speculation.notices,
            *decoding_notices(planned.config, profile.model.expert_bits),
            *precision_notices(network, layers, ready.mended),
            *filter(None, [*blind, borrowing_notice(offloaded, profile)]),
            *low_bit_notices(offloaded, profile),
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
    prefetcher, why_not = None, ""
    if offloaded is not None:
        for layer in offloaded.layers:
            layer.ahead = profile.offload.prefetch
        drafts = profile.speculation.mode in ("auto", "elastic")
        prefetcher, why_not = look_ahead(offloaded, path, config, profile.offload, drafts=drafts)
    expect, apart = None, ""
    if profile.engine.overlap_patience:
        expect, apart = expectation(path, config, [layer.num_experts for layer in layers])
    return prefetcher, expect, [why_not, apart]


@dataclass(frozen=True)
class _Ready:
    """How a loaded model runs; ``mended``: see `moe.loading.takeover.mend_linears`."""

    backbone: Backbone
    packing: Packing
    mended: list[str]
    fused: Fused
    speculation: Speculation


def _make_ready(
    backbone: Backbone, experts: MoELayers, policies: PolicyChain, profile: Profile
) -> _Ready:
    """Find out which faster ways the model can go, and let its policies decide from then on."""
    packing = enable_packing(backbone)
    mended = mend_linears(backbone.model)
    fused = enable_fused(backbone, experts) if profile.engine.fused == "auto" else FUSED_OFF
    speculation = enable_speculation(profile.speculation, backbone, experts, experts.forward)
    # Policies come after the probes, which compare ways to compute the model as it is.
    enable_policies(policies, backbone, experts)
    enable_contrast(profile.speculation, backbone, experts)
    return _Ready(backbone, packing, mended, fused, speculation)


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
