"""Which fused decode steps a model gets: compiled on a CPU, recorded on a GPU, or none and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.cpu import NativeKernels, choose_kernel
from kernels.cpu.experts import LayerCall
from kernels.reference import AnyExperts
from kernels.triton import triton_status
from moe.decode.compiled import FusedStep
from moe.decode.compiled_experts import Inside, Resident, ResidentStep
from moe.decode.prompts import fuse_prompts
from moe.decode.proof import prove
from moe.describe.blocks import describe
from moe.describe.description import Description, Experts, NotDescribed, Router
from moe.describe.observe import observe_random
from moe.network.backbone import Forward, Trunk
from moe.network.kv_cache import Work
from moe.network.moe_layer import MoELayers
from moe.network.seam import trunk_dtype
from offload.layer import OffloadedExperts


@dataclass
class Fused:
    """Whether decode steps are fused, and why (not); on a GPU they may be turned off later."""

    enabled: bool
    reason: str


FUSED_OFF = Fused(False, "engine.fused is off")
"""For a profile that wants transformers' own layers."""


def enable_fused(trunk: Trunk, experts: MoELayers) -> Fused:
    """Let the trunk fuse steps from now on if a probe shows that nothing changes by it."""
    prove_step = _recorded if trunk.device.type == "cuda" else _compiled
    try:
        if not trunk.packed:
            raise NotDescribed("sequences do not share a forward pass")
        forward, reason = prove_step(trunk, experts)
    except NotDescribed as error:
        return Fused(False, str(error))
    except Exception as error:
        # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
        return Fused(False, f"probing raised {type(error).__name__}: {error}")
    fused = Fused(True, reason)
    trunk.fused = partial(_or_transformers, forward, trunk, fused)
    return fused


def _or_transformers(
    forward: Forward, trunk: Trunk, fused: Fused, work: Sequence[Work]
) -> list[Tensor]:
    try:
        return forward(work)
    except NotDescribed as error:
        trunk.fused, fused.enabled, fused.reason = None, False, str(error)
        return trunk.forward_packed(work, decoding=True)


def _compiled(trunk: Trunk, experts: MoELayers) -> tuple[Forward, str]:
    dtype = trunk_dtype(trunk.model)
    if dtype != torch.float32:
        raise NotDescribed(f"the trunk is {dtype} on {trunk.device}, not float32 on the CPU")
    kernel, why_not = choose_kernel()
    if kernel is None:
        raise NotDescribed(why_not)
    description = describe(trunk.model, observe_random(trunk))
    resident, inside = _resident(description, experts, kernel)
    step = FusedStep(description, kernel.decode, inside)
    reason = prove(trunk, description, step)
    whole = ResidentStep(step, resident, experts, step.nearby, step.together)
    prompts = fuse_prompts(trunk, description, kernel.norms)
    return whole, f"{reason}; {prompts}; {whole.where}"


def _resident(
    description: Description, experts: MoELayers, kernel: NativeKernels
) -> tuple[Resident, list[Inside]]:
    """The experts, and how the compiled step runs each layer of them if it can run them all."""
    rows, calls = torch.empty(1, description.norm.weight.numel()), list[LayerCall]()

    def takes(layer: AnyExperts) -> bool:
        call = kernel.layer_call(rows, layer)
        calls.extend([] if call is None else [call])
        return call is not None

    resident = Resident(experts, takes)
    feeds = [layer.feed for layer in description.layers if isinstance(layer.feed, Experts)]
    known = [feed.layer for feed in feeds if isinstance(feed.router, Router)]
    if not resident.why_not and known != list(range(len(experts.layers))):
        resident.why_not = "not every router follows a rule that is known here"
    if resident.why_not:
        return resident, []
    resident.inside = [
        Inside(call, layer.cache.slot_ids(index) if isinstance(layer, OffloadedExperts) else None)
        for index, (call, layer) in enumerate(zip(calls, experts.layers, strict=True))
    ]
    return resident, resident.inside


def _recorded(trunk: Trunk, experts: MoELayers) -> tuple[Forward, str]:
    status = triton_status()
    if status["name"] != "triton":
        raise NotDescribed(status["reason"])
    from moe.decode.recorded import recorded_step  # needs Triton

    return recorded_step(trunk, experts)
