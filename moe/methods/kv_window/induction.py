"""Which key heads look up what followed the same token before, and so need their far tokens.

They are induction heads. RazorAttention (2407.15891) finds them so: a sequence of random tokens
repeats its beginning, and a head's score is the attention that a repeated token pays to the token
behind its first occurrence. Other heads lose little if they see a window.
Legend: N key heads, Q query heads, T queries, L keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe.kv.visibility import HeadScores
from moe.model import MoE
from moe.network.attention import MaskRule, attention_weights, first_keys, observed_attention
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertsRunner, Lane, run_lanes
from moe.network.packed_pass import Work

TOKENS, SEQUENCES = 2048, 2
"""Tokens of a sequence, at most; its last quarter is the first one once more."""
LEAST_TOKENS = 256


def score_heads(model: MoE) -> Iterator[tuple[int, tuple[float, ...]]]:
    """For `moe calibrate`: yield layers that see all tokens, each with the scores of its heads."""
    pool = model.backbone.pool
    windows = {} if pool is None else pool.windows.of_layer
    found = measure_induction(model.backbone, model.experts.run, model.context_length)
    yield from ((layer, own) for layer, own in found.items() if layer not in windows)


@torch.inference_mode()
def measure_induction(backbone: Backbone, run: ExpertsRunner, most: int | None) -> HeadScores:
    """Measure all layers in one pass.

    Args:
        run: runs the experts.
        most: tokens of a sequence; None: no limit.

    Returns:
        Of each layer whose attention sees all tokens; empty if the model's passes cannot be packed.
    """
    length = min(TOKENS, most or TOKENS) // 4 * 4
    if not backbone.packed or length < LEAST_TOKENS:
        return {}
    again = length // 4
    period = length - again
    vocabulary = int(backbone.model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    found: dict[int, list[Tensor]] = {}

    def observe(layer: int, query: Tensor, keys: Tensor, rule: MaskRule, *how: Any) -> None:
        first = first_keys(rule, again, length, query.device)
        if first is None or bool(first.any()):
            return
        score, end = torch.zeros(query.shape[1], device=query.device), 0
        for rows in query[:, :, period:].split(128, 2):
            after = torch.arange(end + 1, end + rows.shape[2] + 1, device=query.device)[:, None]
            end += rows.shape[2]
            weights = attention_weights(rows, keys[:, :, : period + end], rule, *how)
            score += weights.gather(-1, after.expand(*rows.shape[:3], 1)).sum((0, 2, 3)) / again
        found.setdefault(layer, []).append(score.view(keys.shape[1], -1).mean(1).cpu())

    for _ in range(SEQUENCES):
        ids = torch.randint(vocabulary, (period,), generator=generator).tolist()
        work = [Work([*ids, *ids[:again]], backbone.new_cache(length))]

        def read(work: list[Work] = work) -> list[Tensor]:
            with observed_attention(observe):
                return backbone.forward_packed(work)

        lane = Lane(read, "prefill")
        run_lanes([lane], run)
        lane.result()
    return {
        layer: tuple(torch.stack(induction).mean(0).tolist()) for layer, induction in found.items()
    }
