"""Decode steps on a GPU: described and proven on a float32 copy, recorded, and proven again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels import reads_nothing_back
from moe.embeddings import trunk_dtype
from moe.fused.agreement import EXACT, ROUNDED, Run, compare, difference, gaps
from moe.fused.base import StepFunction, Visitor
from moe.fused.describe import describe
from moe.fused.description import Description, NotDescribed
from moe.fused.graphs import GraphStep
from moe.fused.observe import observe_random
from moe.fused.probe import (
    PROMPT_LENGTHS,
    TRIES,
    kv_of,
    prove,
    read_both_ways,
    read_plainly,
)
from moe.fused.recording import Capture, CudaCapture
from moe.fused.reference import reference_step
from moe.fused.resident import Resident, ResidentStep
from moe.fused.shadow import Shadow
from moe.kv import Work
from moe.moe_layer import MoELayers
from moe.packing import random_prompts
from moe.trunk import Forward, Trunk


def recorded_step(
    trunk: Trunk, experts: MoELayers, capture: Callable[[], Capture] = CudaCapture
) -> tuple[Forward, str]:
    """What reads a few tokens of each sequence instead of transformers' forward, and how well.

    Args:
        experts: run within the recording where they can be, else visited.
        capture: see `GraphStep`.

    Raises:
        NotDescribed: it cannot be proven to be the same.
    """
    dtype = trunk_dtype(trunk.model)
    shadow = Shadow.of(trunk)
    copied = describe(shadow.trunk.model, observe_random(shadow.trunk))
    prove(shadow.trunk, copied, partial(reference_step, copied))
    description = shadow.cast(copied)
    rows = torch.empty(1, description.norm.weight.numel(), dtype=dtype, device=trunk.device)
    resident = Resident(experts, partial(reads_nothing_back, rows))
    step = GraphStep(description, trunk.device, dtype, resident.run, capture)
    reason = _prove_recorded(shadow, description, step)
    if not resident.why_not and not resident.cached:
        try:
            _prove_alone(trunk, step, resident.run, dtype)
        except NotDescribed as error:
            resident.why_not = str(error)
    whole = ResidentStep(step, resident, experts)
    return whole, f"{reason}; {whole.where}"


@torch.inference_mode()
def _prove_recorded(shadow: Shadow, description: Description, step: StepFunction) -> str:
    """How near the step on the device of the original comes to the copy, for people.

    Args:
        description: proven on the copy.

    Raises:
        NotDescribed: transformers' own forward there comes clearly nearer.
    """
    layers = [layer.attention.layer for layer in description.layers]
    for attempt in range(TRIES):
        exact, _, _ = read_both_ways(shadow.trunk, lambda _work, _visit: [], attempt)
        theirs, ours, _ = read_both_ways(shadow.original, step, attempt)
        noise = gaps(exact, theirs, layers)
        try:
            found = compare(exact, ours, layers, replace(ROUNDED, noise=noise))
        except NotDescribed as error:
            failure = error
            continue
        logits = noise["logits"].size
        return f"as near to float32 as transformers' forward ({found:.1e}, {logits:.1e})"
    raise failure


@torch.inference_mode()
def _prove_alone(trunk: Trunk, step: GraphStep, experts: Visitor, dtype: torch.dtype) -> None:
    """Raises `NotDescribed` where a step that runs experts by itself gives other logits than one
    that has them run."""
    tokens = random_prompts(trunk, [1] * len(PROMPT_LENGTHS))
    room = max(PROMPT_LENGTHS) + 1
    run = Run([kv_of(trunk.new_cache(room)) for _ in tokens])
    read_plainly(trunk, [t * n for t, n in zip(tokens, PROMPT_LENGTHS, strict=True)], run)
    work = [Work(t, cache) for t, cache in zip(tokens, run.caches, strict=True)]
    again = [replace(item, cache=kv_of(item.cache).fork(room, item.cache.length)) for item in work]
    expected, (actual, _) = torch.cat(step(work, experts)), step.alone(again)
    apart = difference(torch.cat(actual), expected)
    if not apart <= max(EXACT.values, 8 * torch.finfo(dtype).eps):
        raise NotDescribed(f"logits differ by {apart:.1e} with experts inside")
