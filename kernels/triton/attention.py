"""Decode attention on the GPU: one new token a sequence, each sequence with buffers of its own.

A table in device memory (`places`) holds the addresses of each row's keys and values, so that a
captured CUDA graph follows sequences that come, go and grow. Keys are split between programs by the
row's own length, and the splits are joined in order: a row's bits do not depend on other rows.

Shape legend: B rows (position -1: padding, which writes and reads nothing), Q query heads,
N key/value heads, D and V sizes of keys and values, R size of second keys, C caches (one a layer).
`places` is (B, 2 + 2 * C) int64: position, capacity of the buffers, then of each cache where keys
(N, capacity, D) and values (N, capacity, V) begin. A latent cache holds keys (1, capacity, D) that
are the values too, and second keys (1, capacity, R).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import INTERPRETED, compute_type

_HEADS = 16
_PROGRAMS = 4 if INTERPRETED else 128  # of a row, where it sees enough keys
_MOST_SPLITS = 32
_ALL = 1 << 30

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""What every launch passes to Triton's compiler."""


def store(keys: Tensor, values: Tensor, places: Tensor, cache: int) -> None:
    """Put rows (B, N, D) and (B, N, V), contiguous and of the buffers' dtype, into a cache."""
    rows, heads, size = keys.shape
    store_kernel[rows, heads](
        keys, values, places, places.stride(0), 2 + 2 * cache, size, values.shape[2],
        WIDTH_D=_width(size), WIDTH_V=_width(values.shape[2]), **OPTIONS,
    )  # fmt: skip


def attend(
    query: Tensor,
    places: Tensor,
    cache: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_heads: int = 1,
    value_size: int | None = None,
    second: Tensor | None = None,
) -> Tensor:
    """(B, Q, V) float32: ``softmax(softcap * tanh(scale * q k / softcap)) v`` over the keys up to
    each row's position. Products are of the buffers' dtype, sums float32.

    Args:
        query: (B, Q, D), contiguous, of the buffers' dtype.
        cache: index of the layer's cache in `places`.
        window: only this many last keys are seen; None: all.
        softcap: None for plain scores.
        sinks: (Q,) float32 scores that take a share and give nothing.
        kv_heads: N.
        value_size: V of a cache of keys and values; None for a latent one.
        second: (B, Q, R) queries for the second keys of a latent cache.
    """
    rows, heads, size = query.shape
    latent, values = value_size is None, size if value_size is None else value_size
    tiles = triton.cdiv(heads // kv_heads, _HEADS)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (kv_heads * tiles)))
    reach = _ALL if window is None else window
    shared = {"SPLITS": splits, "KEYS": _keys(size, query.dtype), "WIDTH_V": _width(values)}
    peaks, totals = query.new_empty(2, rows, heads, splits, dtype=torch.float32).unbind()
    sums = query.new_empty(rows, heads, splits, values, dtype=torch.float32)
    second = query if second is None else second
    attend_kernel[rows, kv_heads * tiles, splits](
        query, second, places, peaks, totals, sums,
        places.stride(0), 2 + 2 * cache, heads // kv_heads, size, second.shape[2], values,
        reach, scale, softcap or 1.0,
        LATENT=latent, CAPPED=softcap is not None, COMPUTE=compute_type(query.dtype),
        HEADS=_HEADS, WIDTH_D=_width(size), WIDTH_R=_width(second.shape[2]), **shared,
        **OPTIONS,
    )  # fmt: skip
    output = sums.new_empty(rows, heads, values)
    join_kernel[rows, heads](
        peaks, totals, sums, sinks, places, output, places.stride(0), values, reach,
        SUNK=sinks is not None, **shared, **OPTIONS,
    )  # fmt: skip
    return output


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _keys(size: int, dtype: torch.dtype) -> int:
    """Keys of a block: as many as leave registers for the sums (in bf16 none spill on sm_80)."""
    return max(16, min(64, (8 << 10) // (_width(size) * dtype.itemsize)))


# Kernels read every number that changes from step to step from `places`, at ``row * stride``;
# ``entry`` is the column where a cache's addresses begin.


@triton.jit
def store_kernel(
    keys, values, places, stride, entry, D, V, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr
):  # fmt: skip
    own = places + tl.program_id(0).to(tl.int64) * stride
    position = tl.load(own)
    if position < 0:
        return
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    at = head * tl.load(own + 1) + position
    d, v = tl.arange(0, WIDTH_D), tl.arange(0, WIDTH_V)
    to_keys = tl.load(own + entry).to(tl.pointer_type(keys.dtype.element_ty))
    to_values = tl.load(own + entry + 1).to(tl.pointer_type(values.dtype.element_ty))
    tl.store(to_keys + at * D + d, tl.load(keys + row * D + d, mask=d < D), mask=d < D)
    tl.store(to_values + at * V + v, tl.load(values + row * V + v, mask=v < V), mask=v < V)


@triton.jit
def attend_kernel(
    query, second, places, peaks, totals, sums,
    stride, entry, group, D, R, V, window, scale, softcap,
    LATENT: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr, COMPUTE: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH_D: tl.constexpr, WIDTH_R: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    own = places + tl.program_id(0).to(tl.int64) * stride
    position = tl.load(own).to(tl.int32)
    begin = tl.maximum(position - window + 1, 0)
    size = (position + SPLITS * KEYS - begin) // (SPLITS * KEYS) * KEYS
    split = tl.program_id(2)
    low = begin + split * size
    high = tl.minimum(low + size, position + 1)
    if low >= high:
        return
    tiles = tl.cdiv(group, HEADS)
    kv_head = tl.program_id(1) // tiles
    within = tl.program_id(1) % tiles * HEADS + tl.arange(0, HEADS)
    used = within < group
    kv_heads = tl.num_programs(1) // tiles
    head = (tl.program_id(0).to(tl.int64) * kv_heads + kv_head) * group + within
    before = kv_head * tl.load(own + 1)
    element = query.dtype.element_ty
    first = tl.multiple_of(tl.load(own + entry).to(tl.pointer_type(element)), 16)
    other = tl.multiple_of(tl.load(own + entry + 1).to(tl.pointer_type(element)), 16)
    d, r, v = tl.arange(0, WIDTH_D), tl.arange(0, WIDTH_R), tl.arange(0, WIDTH_V)
    q_mask = used[:, None] & (d < D)[None, :]
    q = tl.load(query + head[:, None] * D + d[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    if LATENT:
        r_mask = used[:, None] & (r < R)[None, :]
        q2 = tl.load(second + head[:, None] * R + r[None, :], mask=r_mask, other=0.0).to(COMPUTE)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, WIDTH_V), tl.float32)
    for start in range(low, high, KEYS):
        token = start + tl.arange(0, KEYS)
        seen = token < high
        at = before + token
        k_mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(first + at[:, None] * D + d[None, :], mask=k_mask, other=0.0).to(COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            two_mask = seen[:, None] & (r < R)[None, :]
            k2 = tl.load(other + at[:, None] * R + r[None, :], mask=two_mask, other=0.0)
            scores = tl.dot(q2, tl.trans(k2.to(COMPUTE)), scores, input_precision="ieee")
            values = k
        else:
            v_mask = seen[:, None] & (v < V)[None, :]
            values = tl.load(other + at[:, None] * V + v[None, :], mask=v_mask, other=0.0)
            values = values.to(COMPUTE)
        scores *= scale
        if CAPPED:  # tanh(x) is 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        less = tl.exp(peak - higher)
        total = total * less + tl.sum(shares, 1)
        result = result * less[:, None]
        result = tl.dot(shares.to(COMPUTE), values, result, input_precision="ieee")
        peak = higher
    to = head * SPLITS + split
    tl.store(peaks + to, peak, mask=used)
    tl.store(totals + to, total, mask=used)
    tl.store(sums + to[:, None] * V + v[None, :], result, mask=used[:, None] & (v < V)[None, :])


@triton.jit
def join_kernel(
    peaks, totals, sums, sinks, places, output, stride, V, window,
    SUNK: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(places + row * stride).to(tl.int32)
    begin = tl.maximum(position - window + 1, 0)
    size = (position + SPLITS * KEYS - begin) // (SPLITS * KEYS) * KEYS  # as above
    at = row * tl.num_programs(1) + head
    v = tl.arange(0, WIDTH_V)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((WIDTH_V,), tl.float32)
    # Splits in use, in order; a row of padding has none.
    for split in range(0, (position - begin + size) // tl.maximum(size, 1)):
        own = tl.load(peaks + at * SPLITS + split)
        higher = tl.maximum(peak, own)
        less, more = tl.exp(peak - higher), tl.exp(own - higher)
        total = total * less + tl.load(totals + at * SPLITS + split) * more
        part = tl.load(sums + (at * SPLITS + split) * V + v, mask=v < V, other=0.0)
        result = result * less + part * more
        peak = higher
    if SUNK:
        sink = tl.load(sinks + head)
        higher = tl.maximum(peak, sink)
        less = tl.exp(peak - higher)
        total = total * less + tl.exp(sink - higher)
        result = result * less
    result = result / tl.where(total > 0.0, total, 1.0)
    tl.store(output + at * V + v, result, mask=v < V)
