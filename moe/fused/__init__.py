"""Fused decode steps: transformers' layers run by a few compiled calls, where that is proven right.

A decoder layer is described from its modules and one observed pass, the description is run by
compiled code, and this is used only for models for which a probe at load time reproduces
transformers' own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.cpu import choose_kernel
from moe.embeddings import trunk_dtype
from moe.fused.describe import describe
from moe.fused.description import NotDescribed
from moe.fused.observe import observe
from moe.fused.probe import prove
from moe.fused.step import FusedStep
from moe.lanes import visit_experts
from moe.trunk import Trunk
from moe.visit import ExpertsRunner, Visit
from routing import Routing

__all__ = ["FUSED_OFF", "Fused", "enable_fused"]

_OBSERVED_LENGTHS = (7, 4)


@dataclass(frozen=True)
class Fused:
    """Whether decode steps are fused, and why (not)."""

    enabled: bool
    reason: str


FUSED_OFF = Fused(False, "engine.fused is off")
"""For a profile that wants transformers' own layers."""


def enable_fused(trunk: Trunk, run_experts: ExpertsRunner) -> Fused:
    """Let the trunk fuse steps from now on if a probe shows that nothing changes by it."""
    try:
        step, reason = _proven_step(trunk)
    except NotDescribed as error:
        return Fused(False, str(error))
    trunk.fused = partial(step, visit=partial(_visit, run_experts))
    return Fused(True, reason)


def _proven_step(trunk: Trunk) -> tuple[FusedStep, str]:
    if not trunk.packed:
        raise NotDescribed("sequences do not share a forward pass")
    dtype, device = trunk_dtype(trunk.model), trunk.device
    if device.type != "cpu" or dtype != torch.float32:
        raise NotDescribed(f"the trunk is {dtype} on {device}, not float32 on the CPU")
    kernel, why_not = choose_kernel()
    if kernel is None:
        raise NotDescribed(why_not)
    vocabulary = trunk.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in _OBSERVED_LENGTHS
    ]
    try:
        description = describe(trunk.model, observe(trunk, prompts))
        step = FusedStep(description, kernel.decode)
        return step, prove(trunk, description, step)
    except NotDescribed:
        raise
    except Exception as error:
        # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
        raise NotDescribed(f"probing raised {type(error).__name__}: {error}") from error


def _visit(run_experts: ExpertsRunner, layer: int, rows: Tensor, routing: Routing) -> Tensor:
    return visit_experts(Visit(layer, rows, routing), run_experts)
