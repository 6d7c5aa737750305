"""Which decode step a model gets: compiled on a CPU, CUDA graphs on a GPU, or none and why.

Every step is proven beside transformers' forward first (`moe.decode.proof`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

import torch
from torch import Tensor

from kernels.cpu import NativeKernels, choose_kernel
from kernels.cpu.experts import LayerCall
from kernels.reference import AnyExperts
from kernels.triton import triton_status
from moe.cache_dir.proofs import current_proofs, outline
from moe.decode.compiled import DescribedStep
from moe.decode.lower import operation_names
from moe.decode.program import Program
from moe.decode.prompts import fuse_prompts
from moe.decode.proof import (
    caches_of,
    prove,
    prove_prompts,
    prove_traced,
    tolerance_of,
    traced_tolerance,
    whole_expansions,
)
from moe.decode.records import DescriptionRecords
from moe.decode.step import CompiledExperts, DecodeForward, through_lane, why_outside
from moe.decode.trace import trace
from moe.decode.traced import TracedStep
from moe.describe.decoder import describe
from moe.describe.description import (
    Description,
    Experts,
    NotDescribed,
    Router,
)
from moe.describe.extremes import check_extremes
from moe.describe.observe import observe_random
from moe.describe.row_wise import linears_are_faster
from moe.kv.blocks import BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.network.stored_embedding import backbone_dtype
from offload.layer import OffloadedExperts


@dataclass
class Fused:
    """The state of fused decode steps, and why they are (not) fused; on a GPU they may be turned
    off later.

    Attributes:
        keeps_hidden: sequences can keep the final hidden states of what decode steps read.
        forward: reads decode work; None: transformers' forward does.
    """

    enabled: bool
    reason: str
    keeps_hidden: bool = True
    forward: DecodeForward | None = None


_REST_STEPS = 256
"""Steps until a recording that found no memory is tried again."""
FEW_FLOATS = 1 << 17
"""Weights of float matrices in front of a layer of experts. torch multiplies more of them so much
faster than our kernels that prompts through its layers are faster: on a Xeon by 8 % at H 1024."""
_UNKNOWN_ROUTER = "not every router follows a rule that is known here"

FUSED_OFF = Fused(False, "engine.fused is off")
"""For a profile that asks for transformers' own layers."""


def enable_fused(backbone: Backbone, experts: MoELayers) -> Fused:
    """Let the backbone fuse decode steps from now on if a probe proves them equal."""
    prove_step = _recorded if backbone.device.type == "cuda" else _compiled
    try:
        if not backbone.packed:
            raise NotDescribed("sequences do not share a forward pass")
        if backbone.own_cache.policy is not None and backbone.device.type != "cpu":
            raise NotDescribed("its answers see a window, which recorded steps do not know")
        forward, reason = prove_step(backbone, experts)
    except NotDescribed as error:
        return Fused(False, str(error))
    except Exception as error:
        # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
        return Fused(False, f"probing raised {type(error).__name__}: {error}")
    fused = Fused(True, reason, forward.keeps_hidden, forward)
    backbone.decode_by(_FusedForward(forward, backbone, fused), lambda: forward.runs_ahead)
    return fused


class _FusedForward:
    """Fused decode steps; transformers' own forward where a step cannot be recorded.

    Memory may only be short for a while: then steps of as many rows are recorded again later, and
    smaller ones stay fused. Any other failure turns fused steps off.
    """

    def __init__(self, forward: DecodeForward, backbone: Backbone, fused: Fused) -> None:
        self._forward, self._backbone, self._fused = forward, backbone, fused
        self._reason = fused.reason
        self._most, self._resting = math.inf, 0  # rows that found no memory, and steps until then

    def __call__(self, work: Sequence[Work]) -> list[Tensor]:
        rows = sum(len(item.token_ids) for item in work)
        if rows >= self._most and self._resting:
            self._resting -= 1
            return self._backbone.forward_packed(work, decoding=True)
        if not self._forward.takes(work):
            return self._backbone.forward_packed(work, decoding=True)
        try:
            logits = self._forward(work)
        except NotDescribed as error:  # a recording of a new size failed
            self._rest(rows, error)
        else:
            if rows >= self._most:
                self._most, self._fused.reason = math.inf, self._reason
            return logits
        # Not in the handler: an exception holds on to what its frames hold.
        return self._backbone.forward_packed(work, decoding=True)

    def _rest(self, rows: int, error: NotDescribed) -> None:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            self._most, self._resting = rows, _REST_STEPS
            self._fused.reason = f"{self._reason}; but {error}: tried again later"
        else:
            self._backbone.decode_by(None)
            self._fused.enabled, self._fused.reason = False, str(error)


def _compiled(backbone: Backbone, experts: MoELayers) -> tuple[DecodeForward, str]:
    dtype = backbone_dtype(backbone.model)
    if dtype != torch.float32:
        raise NotDescribed(f"the trunk is {dtype} on {backbone.device}, not float32 on the CPU")
    kernel, why_not = choose_kernel()
    if kernel is None:
        raise NotDescribed(why_not)
    try:
        description = describe(backbone.model, observe_random(backbone))

        def holds() -> bool:
            check_extremes(description, backbone)
            return True

        current_proofs().recall("extremes", outline(description), bool, holds, NotDescribed)
        feeds = [layer.feed for layer in description.layers if isinstance(layer.feed, Experts)]
        unknown = any(not isinstance(feed.router, Router) for feed in feeds)
        described = partial(_described_step, backbone, experts, kernel, description)
        if not unknown:
            return described()
        why_not = _UNKNOWN_ROUTER
    except NotDescribed as error:
        why_not, described = str(error), None
    try:
        return _traced_step(backbone, experts, kernel)
    except NotDescribed as error:
        if described is not None:  # slower, as it stops for each router
            return described()
        raise NotDescribed(f"{why_not}; traced: {error}") from error


def _described_step(
    backbone: Backbone, experts: MoELayers, kernel: NativeKernels, description: Description
) -> tuple[DecodeForward, str]:
    feeds = [layer.feed for layer in description.layers if isinstance(layer.feed, Experts)]
    order = [feed.layer for feed in feeds]
    if all(isinstance(feed.router, Router) for feed in feeds):
        inside, why_not = _compiled_experts(experts, kernel, order)
    else:
        inside, why_not = [], _UNKNOWN_ROUTER
    step = DescribedStep(description, kernel.decode, inside)
    description = step.description
    proof = partial(prove, backbone, description, step)
    reason = current_proofs().recall("decode step", outline(description), str, proof, NotDescribed)
    forward = DecodeForward(step, experts, why_not, order)
    pool = BlockPool(HostBlocks(kernel.kv, KVFormat.of_bits(32)), Windows())
    prompts = _compiled_prompts(backbone, description, step, pool)
    if not prompts:
        routed = through_lane(experts.run)
        backbone.prompt_forward = lambda work: step.prompts(work, routed)
    fused = fuse_prompts(backbone, description, kernel.norms)
    how = f"{fused} ({prompts})" if prompts else "prompts compiled"
    return forward, f"{reason}; {how}; {forward.where}"


def _compiled_prompts(
    backbone: Backbone, description: Description, step: DescribedStep, pool: BlockPool
) -> str:
    """Why prompts are not read by the step; empty if they can be."""
    if why_not := step.why_no_prompts(linears_are_faster(backbone)):
        return why_not

    def holds() -> bool:
        caches, tolerance = caches_of(description), tolerance_of(description)
        prove_prompts(backbone, caches, tolerance, step.prompts, pool)
        return True

    try:
        current_proofs().recall("prompts", outline(description), bool, holds, NotDescribed)
    except Exception as error:  # as in `enable_fused`: an architecture may do anything
        return f"{type(error).__name__}: {error}"
    return ""


def _traced_step(
    backbone: Backbone, experts: MoELayers, kernel: NativeKernels
) -> tuple[DecodeForward, str]:
    """A step of what one recorded token did."""
    traced = trace(backbone, operation_names())
    program = Program(traced, DescriptionRecords())
    order = [unit.layer for unit in program.experts]
    inside, why_not = _compiled_experts(experts, kernel, order)
    embedding = backbone.model.get_input_embeddings()
    step = TracedStep(program, embedding, kernel.decode, inside)
    every = lcm(*(own.rate for own in backbone.own_cache.layers.values()))
    proof = partial(prove_traced, backbone, step, program.layers, program.latents(), every)
    reason = current_proofs().recall("traced step", outline(traced), str, proof, NotDescribed)
    forward = DecodeForward(step, experts, why_not, order)
    try:
        if program.float_weights > FEW_FLOATS and not linears_are_faster(backbone):
            raise NotDescribed("matrices of floats")
        holds = partial(_prompts_proven, backbone, kernel, program, step)
        current_proofs().recall("traced prompts", outline(traced), bool, holds, NotDescribed)
    except Exception as error:  # as in `enable_fused`: an architecture may do anything
        how = f"prompts left to transformers: {type(error).__name__}: {error}"
    else:
        routed, how = through_lane(experts.run), "prompts compiled"
        backbone.prompt_forward = lambda work: step.prompts(work, routed)
    return forward, f"traced, {reason}; {how}; {forward.where}"


def _prompts_proven(
    backbone: Backbone, kernel: NativeKernels, program: Program, step: TracedStep
) -> bool:
    pool = BlockPool(HostBlocks(kernel.kv, KVFormat.of_bits(32)), Windows())
    with whole_expansions(backbone, program.latents(prompts=True)):
        prove_prompts(backbone, program.layers, traced_tolerance(backbone), step.prompts, pool)
    return True


def _compiled_experts(
    experts: MoELayers, kernel: NativeKernels, order: Sequence[int]
) -> tuple[Sequence[CompiledExperts], str]:
    """Return what runs the experts of each visit to a MoE layer in a compiled step; none, and why
    not.

    Args:
        order: the MoE layer of each visit. Looped models come to some layers again; tokens of text
            pass by layers for images.
    """
    calls = list[LayerCall]()

    def takes(layer: AnyExperts) -> bool:
        call = kernel.layer_call(torch.empty(1, layer.hidden_size), layer)
        calls.extend([] if call is None else [call])
        return call is not None

    why_not = why_outside(experts, takes)
    if why_not:
        return [], why_not
    slots = [
        layer.cache.slot_ids(layer.layer) if isinstance(layer, OffloadedExperts) else None
        for layer in experts.layers
    ]
    return [CompiledExperts(calls[layer], slots[layer]) for layer in order], ""


def _recorded(backbone: Backbone, experts: MoELayers) -> tuple[DecodeForward, str]:
    status = triton_status()
    if status["name"] != "triton":
        raise NotDescribed(status["reason"])
    from moe.decode.recorded import recorded_step  # needs Triton

    return recorded_step(backbone, experts)
