"""A router in two kernels: from rows to the logits of all experts, and by its rule to the chosen
ones and their weights.

A program decides for one token, with all its scores in registers. Legend: T tokens, E experts, K
slots a token, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import (
    compute_type,
    masked_by,
    overlap_options,
    wait_for_others,
)

SCORES = {"softmax": 0, "sigmoid": 1, "mixer": 2}
LOGITS_TILE = {"ROWS": 4, "COLUMNS": 2, "DEPTH": 1024}
LOGITS_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
MOST_TOKENS = 256
"""For which `logits_kernel` pays: those of a decode step. It reads a matrix again for every few
tokens."""
PROMPT_TILE = {"ROWS": 64, "COLUMNS": 32, "DEPTH": 64}
PROMPT_OPTIONS = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}


def options(experts: int) -> dict[str, int | bool]:
    """Return options of every launch for Triton's compiler: one warp, as long as its registers hold
    the scores."""
    return {"num_warps": 1 if experts <= 256 else 2, "enable_fp_fusion": False}


@triton.jit
def logits_kernel(
    rows, weight, bias, logits, tokens, experts, weight_row,
    H: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)[None, None, :]
    from_rows = rows + token.to(tl.int64)[:, None, None] * H + depth
    from_weight = weight + expert.to(tl.int64)[None, :, None] * weight_row + depth
    known = (token < tokens)[:, None, None]
    there = (expert < experts)[None, :, None]
    sums = tl.zeros((ROWS, COLUMNS, DEPTH), tl.float32)
    for k in tl.static_range(0, H, DEPTH):
        rest = depth < H - k
        own = tl.load(from_rows + k, mask=known & rest, other=0.0)
        tile = tl.load(from_weight + k, mask=there & rest, other=0.0)
        sums += own * tile.to(tl.float32)
    made = tl.sum(sums, 2)
    if HAS_BIAS:
        made += tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    to = logits + token.to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(to, made, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def _leading(x):
    """The first eight bits of float32 numbers: bf16 holds them."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def prompt_logits_kernel(
    rows, weight, bias, logits, tokens, experts, weight_row, H,
    HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """By matrix instructions: three bf16 numbers have all 24 bits of a float32 one, so products
    with bf16 weights are exact. Sums of a depth are added in float32, as these instructions cut
    bits where others round."""
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    from_rows = rows + token.to(tl.int64)[:, None] * H + depth[None, :]
    from_weight = weight + expert.to(tl.int64)[:, None] * weight_row + depth[None, :]
    known, there = (token < tokens)[:, None], (expert < experts)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, H, DEPTH):
        rest = (depth < H - k)[None, :]
        own = tl.load(from_rows + k, mask=known & rest, other=0.0)
        tile = tl.trans(tl.load(from_weight + k, mask=there & rest, other=0.0).to(COMPUTE))
        first = _leading(own)
        second = _leading(own - first)
        third = own - first - second
        part = tl.dot(third.to(COMPUTE), tile, input_precision="ieee")
        part = tl.dot(second.to(COMPUTE), tile, part, input_precision="ieee")
        sums += tl.dot(first.to(COMPUTE), tile, part, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    to = logits + token.to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(to, sums, mask=known & (expert < experts)[None, :])


def takes(tokens: int, weight_EH: Tensor) -> bool:
    """Return whether `logits` pays for so many tokens."""
    return tokens <= MOST_TOKENS or weight_EH.dtype == torch.bfloat16


def logits(rows_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """(T, E) float32 ``rows W^T + bias``, products in float32. A row's bits depend on itself, and
    on whether there are more than `MOST_TOKENS`.

    Args:
        rows_TH: float32, contiguous.
        weight_EH: of any float dtype; its rows may lie apart.
        bias_E: float32.
    """
    (tokens, hidden), experts = rows_TH.shape, len(weight_EH)
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=rows_TH.device)
    if tokens > MOST_TOKENS and weight_EH.dtype == torch.bfloat16:
        tile = PROMPT_TILE
        grid = triton.cdiv(experts, tile["COLUMNS"]), triton.cdiv(tokens, tile["ROWS"])
        prompt_logits_kernel[grid](
            rows_TH, weight_EH, bias_E, logits_TE, tokens, experts, weight_EH.stride(0), hidden,
            HAS_BIAS=bias_E is not None, COMPUTE=compute_type(torch.bfloat16),
            **tile, **PROMPT_OPTIONS,
        )  # fmt: skip
        return logits_TE
    tile = LOGITS_TILE
    grid = triton.cdiv(experts, tile["COLUMNS"]), triton.cdiv(tokens, tile["ROWS"])
    logits_kernel[grid](
        rows_TH, weight_EH, bias_E, logits_TE, tokens, experts, weight_EH.stride(0),
        H=hidden, HAS_BIAS=bias_E is not None, **tile, **LOGITS_OPTIONS,
        **overlap_options(),
    )  # fmt: skip
    return logits_TE


@triton.jit
def decide_kernel(
    logits, correction, expert_scale, places, ids, weights, experts, per_group, scale, threshold,
    SCORE: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BY_TWO: tl.constexpr, RENORMALISE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_PLACES: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    never = float("-inf")
    row = tl.load(logits + token * experts + expert, mask=inside, other=never).to(tl.float32)
    chosen = expert < 0
    if SCORE == 2:  # SparseMixer: `RouterRule._mix`
        own = tl.zeros((EXPERTS,), tl.float32)
        left = row
        for _ in tl.static_range(K):
            best = tl.max(left)
            at = tl.argmax(left, 0)
            far = (best - row) / tl.maximum(tl.abs(row), best) > threshold
            share = tl.sum(tl.where(inside & (left > never) & (far == 0), tl.exp(left - best), 0.0))
            taken = (expert == at) & (left > never)
            own = tl.where(taken, 1.0 / share, own)
            chosen = chosen | taken
            left = tl.where(taken, never, left)
    else:
        if SCORE == 0:
            spread = tl.exp(row - tl.max(row))
            own = spread / tl.sum(spread)
        else:
            own = 1.0 / (1.0 + tl.exp(-row))
        rank = own
        if HAS_CORRECTION:
            rank += tl.load(correction + expert, mask=inside, other=0.0)
        rank = tl.where(rank != rank, float("inf"), rank)  # NaN is the largest, as in a sort
        rank = tl.where(inside, rank, never)
        if GROUPS > 1:
            group = expert // per_group
            kept = expert < 0
            values = tl.zeros((EXPERTS,), tl.float32) + never  # of each group, at its number
            for number in tl.static_range(GROUPS):
                members = tl.where(group == number, rank, never)
                value = tl.max(members)
                if BY_TWO:
                    second = tl.max(tl.where(expert == tl.argmax(members, 0), never, members))
                    value += tl.where(second > never, second, 0.0)
                values = tl.where(expert == number, value, values)
            for _ in tl.static_range(KEPT):
                best = tl.argmax(values, 0)
                kept = kept | (group == best)
                values = tl.where(expert == best, never, values)
            rank = tl.where(kept, rank, never)
        for _ in tl.static_range(K):
            taken = (expert == tl.argmax(rank, 0)) & (rank > never)
            chosen = chosen | taken
            rank = tl.where(taken, never, rank)
        if RENORMALISE:
            total = tl.sum(tl.where(chosen, own, 0.0))
            own = own / tl.where(total != 0, total, 1.0)
    if HAS_SCALE:
        own *= tl.load(expert_scale + expert, mask=inside, other=0.0)
    if HAS_PLACES:
        chosen = masked_by(chosen, tl.load(places + token) >= 0)
    # The chosen ones in ascending order, then unused slots.
    count = tl.cumsum(chosen.to(tl.int32), 0)
    to = token * K + count - 1
    tl.store(ids + to, expert.to(tl.int64), mask=chosen)
    tl.store(weights + to, own * scale, mask=chosen)
    unused = (expert >= tl.max(count)) & (expert < K)
    tl.store(ids + token * K + expert, tl.full((EXPERTS,), -1, tl.int64), mask=unused)
    tl.store(weights + token * K + expert, tl.zeros((EXPERTS,), tl.float32), mask=unused)


def decide(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    correction_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    by_two: bool = False,
    renormalise: bool = False,
    scale: float = 1.0,
    threshold: float = 0.0,
    expert_scale_E: Tensor | None = None,
    places_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(T, K) int64 ids in ascending order, -1 in unused slots, and float32 weights.

    `routing.routers.RouterRule` is the reference, and says what the settings mean; weights may
    differ from its in their last bits.

    Args:
        logits_TE: any float dtype; 512 experts at most fit into registers.
        top_k: at most E.
        score: a key of `SCORES`.
        correction_E, expert_scale_E: float32.
        by_two: groups are ranked by their two largest scores.
        places_T: int64; rows with a negative one are padding, which visits nobody.
    """
    tokens, experts = logits_TE.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        decide_kernel[(tokens,)](
            logits_TE.contiguous(), correction_E, expert_scale_E, places_T, ids, weights,
            experts, experts // groups, scale, threshold,
            SCORE=SCORES[score], K=top_k, GROUPS=groups, KEPT=groups_kept, BY_TWO=by_two,
            RENORMALISE=renormalise, HAS_CORRECTION=correction_E is not None,
            HAS_SCALE=expert_scale_E is not None, HAS_PLACES=places_T is not None,
            EXPERTS=triton.next_power_of_2(experts), **options(experts), **overlap_options(),
        )  # fmt: skip
    return ids, weights
