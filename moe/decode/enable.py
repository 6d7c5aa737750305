"""Which decode step a model gets: compiled on a CPU, CUDA graphs on a GPU, or none and why.

Every step is proven beside transformers' forward first (`moe.decode.proof`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import NativeKernels, choose_kernel
from kernels.cpu.experts import LayerCall
from kernels.reference import AnyExperts
from kernels.triton import triton_status
from moe.decode.compiled import CompiledStep
from moe.decode.prompts import fuse_prompts
from moe.decode.proof import prove
from moe.decode.step import CompiledExperts, DecodeForward, why_outside
from moe.describe.decoder import describe
from moe.describe.description import Description, Experts, NotDescribed, Router
from moe.describe.observe import observe_random
from moe.network.backbone import Backbone, Forward
from moe.network.kv_cache import Work
from moe.network.moe_layer import MoELayers
from moe.network.stored_embedding import backbone_dtype
from offload.layer import OffloadedExperts


@dataclass
class Fused:
    """Whether decode steps are fused, and why (not); on a GPU they may be turned off later."""

    enabled: bool
    reason: str


FUSED_OFF = Fused(False, "engine.fused is off")
"""For a profile that asks for transformers' own layers."""


def enable_fused(backbone: Backbone, experts: MoELayers) -> Fused:
    """Let the backbone fuse decode steps from now on if a probe proves them equal."""
    prove_step = _recorded if backbone.device.type == "cuda" else _compiled
    try:
        if not backbone.packed:
            raise NotDescribed("sequences do not share a forward pass")
        forward, reason = prove_step(backbone, experts)
    except NotDescribed as error:
        return Fused(False, str(error))
    except Exception as error:
        # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
        return Fused(False, f"probing raised {type(error).__name__}: {error}")
    fused = Fused(True, reason)

    def forward_or_transformers(work: Sequence[Work]) -> list[Tensor]:
        try:
            return forward(work)
        except NotDescribed as error:  # a recording of a new size failed
            backbone.decode_by(None)
            fused.enabled, fused.reason = False, str(error)
            return backbone.forward_packed(work, decoding=True)

    backbone.decode_by(forward_or_transformers)
    return fused


def _compiled(backbone: Backbone, experts: MoELayers) -> tuple[Forward, str]:
    dtype = backbone_dtype(backbone.model)
    if dtype != torch.float32:
        raise NotDescribed(f"the trunk is {dtype} on {backbone.device}, not float32 on the CPU")
    kernel, why_not = choose_kernel()
    if kernel is None:
        raise NotDescribed(why_not)
    description = describe(backbone.model, observe_random(backbone))
    inside, why_not = _compiled_experts(description, experts, kernel)
    step = CompiledStep(description, kernel.decode, inside)
    reason = prove(backbone, description, step)
    forward = DecodeForward(step, experts, why_not)
    prompts = fuse_prompts(backbone, description, kernel.norms)
    return forward, f"{reason}; {prompts}; {forward.where}"


def _compiled_experts(
    description: Description, experts: MoELayers, kernel: NativeKernels
) -> tuple[Sequence[CompiledExperts], str]:
    """What runs the experts of each MoE layer in a compiled step; none, and why not."""
    rows, calls = torch.empty(1, description.norm.weight.numel()), list[LayerCall]()

    def takes(layer: AnyExperts) -> bool:
        call = kernel.layer_call(rows, layer)
        calls.extend([] if call is None else [call])
        return call is not None

    why_not = why_outside(experts, takes)
    feeds = [layer.feed for layer in description.layers if isinstance(layer.feed, Experts)]
    known = [feed.layer for feed in feeds if isinstance(feed.router, Router)]
    if not why_not and known != list(range(len(experts.layers))):
        why_not = "not every router follows a rule that is known here"
    if why_not:
        return [], why_not
    slots = [
        layer.cache.slot_ids(index) if isinstance(layer, OffloadedExperts) else None
        for index, layer in enumerate(experts.layers)
    ]
    return list(map(CompiledExperts, calls, slots)), ""


def _recorded(backbone: Backbone, experts: MoELayers) -> tuple[Forward, str]:
    status = triton_status()
    if status["name"] != "triton":
        raise NotDescribed(status["reason"])
    from moe.decode.recorded import recorded_step  # needs Triton

    return recorded_step(backbone, experts)
