"""The rule by which a router chooses experts, found by trying rules on rows it has routed.

Where no rule fits, the router's own module is called for each step, provided that there is one
that returns ids and weights by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moe.fused.description import (
    GroupScore,
    NotDescribed,
    OwnRouter,
    Projection,
    RouterRule,
    Score,
)
from moe.fused.observe import Observation
from moe.fused.parts import project, same

_ROWS = 256
_TOLERANCE = 1e-4


def describe_router(
    block: nn.Module, experts: nn.Module, ids: Tensor, weights: Tensor, seen: Observation
) -> RouterRule | OwnRouter:
    """The rule of the router in ``block`` that gave its experts these ids and weights."""
    own = _own_module(block, experts, ids, weights, seen)
    whole = seen.call(block)
    assert whole is not None
    size = whole.hidden.shape[-1]
    if own is not None:
        rows = torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            ids, weights = own(rows)
    else:
        rows = whole.hidden.reshape(-1, size)
    seat: Any = experts.expert_seat
    for rule in _rules(block, experts, seat.num_experts, ids.shape[-1]):
        fitted = _fit(rule, rows.float(), ids, weights.float())
        if fitted is not None:
            return fitted
    if own is None:
        raise NotDescribed("the router follows no rule that is known here")
    return OwnRouter(own)


def route(rule: RouterRule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``(T, K)`` ids and weights of float32 rows ``(T, H)``."""
    logits = project(rule.weight, rows)
    if rule.score == "mixer":
        return _mix(logits, rule)
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    chosen_by = scores if rule.correction is None else scores + rule.correction
    if rule.groups > 1:
        grouped = chosen_by.unflatten(-1, (rule.groups, -1))
        best = grouped.topk(1 if rule.group_score == "max" else 2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(rule.groups_kept, -1).indices, 1.0)
        chosen_by = grouped.masked_fill(kept[..., None] == 0, -float("inf")).flatten(-2)
    ids = chosen_by.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(-1, ids)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * rule.scale


def _mix(logits: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """SparseMixer (arXiv 2409.12136): one after the other, the largest logit is taken and weighted
    by a softmax over those logits left that come near it."""
    left, ids, weights = logits, [], []
    for _ in range(rule.top_k):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > rule.mixer_threshold
        probabilities = left.masked_fill(far, -float("inf")).softmax(-1)
        ids.append(index)
        weights.append(probabilities.gather(-1, index))
        left = left.scatter(-1, index, -float("inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1) * rule.scale


def _fit(rule: RouterRule, rows: Tensor, ids: Tensor, weights: Tensor) -> RouterRule | None:
    """The rule with its scale, if it gives these choices (in any order) and weights."""
    actual_ids, actual = route(rule, rows)
    order, actual_order = ids.sort(-1), actual_ids.sort(-1)
    if not torch.equal(order.values, actual_order.values):
        return None
    expected, actual = weights.gather(-1, order.indices), actual.gather(-1, actual_order.indices)
    actual, expected = actual.detach(), expected.detach()
    scale = float((expected * actual).sum() / (actual * actual).sum())
    scale = 1.0 if abs(scale - 1) < 1e-5 else scale
    if bool((expected - scale * actual).abs().max() > _TOLERANCE * expected.abs().max()):
        return None
    return replace(rule, scale=scale)


def _rules(
    block: nn.Module, experts: nn.Module, num_experts: int, top_k: int
) -> Iterator[RouterRule]:
    inside = set(experts.modules())
    modules = [module for module in block.modules() if module not in inside]
    tensors = [
        (module, name, tensor)
        for module in modules
        for name, tensor in (*module.named_parameters(recurse=False),
                             *module.named_buffers(recurse=False))
    ]  # fmt: skip
    vectors = [t.detach().float().reshape(-1) for _, _, t in tensors if t.numel() == num_experts]
    matrices = [
        (module, t) for module, _, t in tensors if t.ndim == 2 and t.shape[0] == num_experts
    ]
    groupings = _groupings(modules, num_experts)
    scores: tuple[Score, ...] = ("softmax", "sigmoid")
    for module, matrix in matrices:
        # A vector that is there is most likely used, and too small to show if it does not.
        for correction, bias in product([*vectors, None], [*vectors, None]):
            if bias is not None and bias is correction:
                continue
            weight = Projection(matrix.detach(), bias, module)
            for renormalise, groups, score in product((False, True), groupings, scores):
                yield RouterRule(weight, score, top_k, correction, *groups, renormalise)
        for number in _numbers(modules):
            weight = Projection(matrix.detach(), None, module)
            yield RouterRule(weight, "mixer", top_k, mixer_threshold=2 * number)


def _groupings(modules: list[nn.Module], num_experts: int) -> list[tuple[int, int, GroupScore]]:
    """Numbers of groups, of those kept, and how groups are compared, by what attributes say."""
    counts = {
        value
        for module in modules
        for name, value in vars(module).items()
        if "group" in name and type(value) is int and value >= 1
    }
    kinds: tuple[GroupScore, ...] = ("top2", "max")
    restricted = [
        (groups, kept, kind)
        for groups, kept, kind in product(counts, counts, kinds)
        if kept < groups and num_experts % groups == 0
    ]
    return [*restricted, (1, 1, "max")]


def _numbers(modules: list[nn.Module]) -> list[float]:
    return [v for m in modules for v in vars(m).values() if isinstance(v, float) and 0 < v < 1]


def _own_module(
    block: nn.Module, experts: nn.Module, ids: Tensor, weights: Tensor, seen: Observation
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """The module that returned these ids and weights, as a function of rows."""
    inside = set(experts.modules())
    for module in block.modules():
        call = seen.call(module)
        if module is block or module in inside or call is None or len(call.outputs) < 2:
            continue
        outputs = [value if isinstance(value, Tensor) else None for value in call.outputs]
        id_at = next((i for i, v in enumerate(outputs) if v is not None and same(v, ids)), None)
        weight_at = next(
            (i for i, v in enumerate(outputs) if v is not None and same(v, weights)), None
        )
        if id_at is None or weight_at is None or len(call.inputs) != 1 or call.kwargs:
            continue

        def forward(
            rows: Tensor, module: nn.Module = module, i: int = id_at, w: int = weight_at
        ) -> tuple[Tensor, Tensor]:
            given = module(rows)
            return given[i], given[w]

        return forward
    return None
