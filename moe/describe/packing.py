"""May sequences share one forward pass? Decided by trying, not by a list of architectures.

A packed pass is used for a model only when, on random tokens, it reproduces transformers' own
attention for prompts of different lengths and for a decode step behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experts.linear import QuantizedLinear
from moe.network.backbone import Backbone
from moe.network.kv_cache import Work
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.seam import backbone_dtype
from routing import Phase

PROMPT_LENGTHS = (7, 4)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits allowed, relative to the largest logit, by the trunk's dtype."""
QUANTIZED = 3e-2
"""The same where linear layers round what they read to 8 bits: a last bit that differs before one,
as by another number of threads, is a step of a code behind it. A wrong mask differs by far more."""


@dataclass(frozen=True)
class Packing:
    """Whether several sequences share one forward pass, and why (not)."""

    enabled: bool
    reason: str


def enable_packing(backbone: Backbone) -> Packing:
    """Pack sequences from now on if a probe shows that nothing changes by it."""
    packing = _probe(backbone)
    backbone.set_packed(packing.enabled)
    return packing


def _probe(backbone: Backbone) -> Packing:
    """Run random prompts and one decode step both ways and compare all logits.

    The experts are replaced by a cheap stand-in, so probing a large model reads its trunk only.
    """
    rope = _batch_dependent_rope(backbone.model)
    if rope is not None:
        return Packing(False, f"'{rope}' rotary tables depend on the longest sequence of a batch")
    prompts = random_prompts(backbone, PROMPT_LENGTHS)
    with torch.inference_mode():
        expected = _logits(backbone, prompts, packed=False)
        try:
            packed = _logits(backbone, prompts, packed=True)
        except Exception as error:
            return Packing(False, f"packed attention raised {type(error).__name__}: {error}")
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
        for a, b in zip(packed, expected, strict=True)
    )
    if difference <= _tolerance(backbone.model):
        return Packing(True, f"equal to transformers' own attention (difference {difference:.1e})")
    return Packing(False, f"differs from transformers' own attention by {difference:.1e}")


def _tolerance(model: PreTrainedModel) -> float:
    rounds = any(isinstance(module, QuantizedLinear) for module in model.modules())
    return max(TOLERANCE[backbone_dtype(model)], QUANTIZED if rounds else 0.0)


def _logits(backbone: Backbone, prompts: Sequence[list[int]], *, packed: bool) -> list[Tensor]:
    backbone.set_packed(packed)
    caches = [backbone.new_cache(len(prompt) + 1) for prompt in prompts]
    logits = []
    steps: list[tuple[Phase, Sequence[list[int]]]] = [
        ("prefill", prompts),
        ("decode", [prompt[:1] for prompt in prompts]),
    ]
    for phase, step in steps:
        lanes = backbone.lanes(
            [
                Work(tokens, cache, all_logits=True)
                for tokens, cache in zip(step, caches, strict=True)
            ],
            phase,
        )
        run_lanes(lanes, stand_in)
        logits += [rows for lane in lanes for rows in lane.result()]
    return logits


def random_prompts(backbone: Backbone, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids to probe a model with, the same each time."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = backbone.model.get_input_embeddings().num_embeddings
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def stand_in(_layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
    """Rows that cost nothing and hardly change where two experts are nearly equally good."""
    pairs = [(call.hidden_states, call.routing.weights) for call in calls]
    return [(rows * (0.25 + w.sum(1, keepdim=True))).to(rows.dtype) for rows, w in pairs]


def _batch_dependent_rope(model: nn.Module) -> str | None:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        for kind in rope_type.values() if isinstance(rope_type, dict) else [rope_type]:
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                return kind
    return None
