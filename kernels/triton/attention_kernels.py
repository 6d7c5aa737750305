"""The kernels of `attention`: writing rows of keys and values, partial attention, and its join.

Every number that changes from step to step is read from `places` (see attention.py), at
``row * stride``; ``entry`` is the column where a cache's addresses begin.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
