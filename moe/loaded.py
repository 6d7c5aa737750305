"""A loaded model, as a value: what `moe.loader` makes and the rest of `moe` runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels import Backend
from moe.calibrate.foresight import Expect
from moe.fused.enable import Fused
from moe.loading.generation_config import OwnSampling
from moe.moe_layer import MoELayers
from moe.packing import Packing
from moe.plan.memory import MemoryPlan
from moe.sampling.constraint import Structures
from moe.speculate import Speculation
from moe.text.prompts import TextCodec
from moe.trunk import Trunk
from offload.offloaded import Offloaded


@dataclass
class LoadedModel:
    """Everything that belongs to one loaded model.

    Attributes:
        trunk: the model without its experts.
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

    trunk: Trunk
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
