"""Attention on the GPU over keys and values in blocks: prompts, chunks, decode steps.

One kernel serves them all. A *span* is some successive queries of one sequence; a program takes a
part of a span's queries, with all query heads of one key/value head, and walks over tiles of keys.
Tiles begin at multiples of their size, so that a query's bits do not depend on which queries share
its program: a prompt gets the same bits whole and in chunks. Decode steps have spans of one query
and split the keys between programs by that query's own position; `join_kernel` joins the splits in
order, so a row's bits do not depend on other rows. Everything that changes from step to step is
read from device memory, so that CUDA graphs can replay the launches.

The softmax is computed online, as in FlashAttention (arXiv 2205.14135) and, for split keys,
Flash-Decoding.

Shape legend: T queries of all sequences, S spans, Q query heads, N key/value heads, D and V sizes
of keys and values, R size of second keys, P blocks of the pool.
`spans` is (S, 4) int32: the row of the block table (or, of keys without blocks, where the
sequence's keys begin), the first query, the number of queries (0: padding), and the position of the
first query in its sequence. `firsts` is (T,) int32: the first key that each query sees; it sees all
from there to its own position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import INTERPRETED, compute_type

BLOCK = 64
"""Tokens of a block."""
DECODE_ROWS = 16
"""Queries times heads of a program of a decode step: what matrix instructions take at least."""
_PROGRAMS = 4 if INTERPRETED else 128  # of a query, where it sees enough keys
_MOST_SPLITS = 32


class KeyRows(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        keys: (P, N, 64, D) in blocks, or (N, L, D): of all sequences, one behind the other.
        values: the same with V numbers; None: latent keys, which are the values too.
        second: the same with R numbers: keys that second queries meet; None: there are none.
        tables: (rows, columns) int32: of each sequence its blocks in order; None: not in blocks.
    """

    keys: Tensor
    values: Tensor | None
    second: Tensor | None = None
    tables: Tensor | None = None


class KeyTile(NamedTuple):
    """What a program takes at a time: query rows and keys, and its launch.

    Attributes:
        rows: queries times query heads of one key/value head.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """What a launch passes to Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


JOIN_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


def decode_tile(size: int, dtype: torch.dtype) -> KeyTile:
    """Of spans of one query; ``size`` is the larger of D and V."""
    numbers = (8 << 10) // (1 if dtype.itemsize == 2 else 4)  # of a tile; more would spill
    return KeyTile(DECODE_ROWS, max(16, min(64, numbers // _width(size))), 4, 2)


def prompt_tile(size: int, dtype: torch.dtype) -> KeyTile:
    """Of spans of several queries; no tile spills registers on sm_80 to sm_90."""
    if INTERPRETED:
        return KeyTile(64, 64, 4, 1)
    width = _width(size)
    if dtype.itemsize > 2:  # no matrix instructions: few rows, so that sums stay in registers
        return KeyTile(16, max(16, min(64, 2048 // width)), 4, 1)
    return KeyTile(128 if width <= 128 else 64, 64 if width <= 64 else 32, 8, 2)


def prompt_queries(group: int, size: int, value_size: int, dtype: torch.dtype) -> int:
    """Most queries of a span of prompts: a program takes them with one key/value head.

    Args:
        group: query heads of a key/value head.
        size, value_size: D and V.
    """
    first, _ = _halves(size)
    return max(2, prompt_tile(max(first, value_size), dtype).rows // group)


def attend(
    query: Tensor,
    rows: KeyRows,
    spans: Tensor,
    firsts: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    second: Tensor | None = None,
    most_queries: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(T, Q, V) ``softmax(softcap * tanh(scale * q k / softcap)) v``; products are of the query's
    dtype, sums float32. Queries in no span get nothing written, those of padding get zeros where
    spans have one query.

    Args:
        query: (T, Q, D) of the keys' dtype; numbers of a head lie side by side.
        softcap: None for plain scores.
        sinks: (Q,) float32 scores that take a share and give nothing.
        second: (T, Q, R) queries for the second keys.
        most_queries: of a span. With 1, span i has query i, and keys are split between programs.
        dtype: of the output; None: float32.
    """
    (tokens, heads, size), kv_heads = query.shape, rows.keys.shape[-3]
    group, splitting = heads // kv_heads, most_queries == 1
    latent = rows.values is None
    values = rows.keys if rows.values is None else rows.values
    value_size = values.shape[-1]
    queries, keys = [query], [rows.keys]
    if second is not None and rows.second is not None:
        queries, keys = [query, second], [rows.keys, rows.second]
    elif not latent and (first := _halves(size)[0]) < size:
        queries, keys = ([t[..., :first], t[..., first:]] for t in (query, rows.keys))
    both = len(queries) == 2
    widest = max(queries[0].shape[-1], value_size)
    tile = (decode_tile if splitting else prompt_tile)(widest, query.dtype)
    parts = triton.cdiv(most_queries * group, tile.rows)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (kv_heads * parts))) if splitting else 1
    output = query.new_empty(tokens, heads, value_size, dtype=dtype or torch.float32)
    if splits == 1:
        peaks = totals = sums = output
    else:
        peaks, totals = query.new_empty(2, tokens, heads, splits, dtype=torch.float32).unbind()
        sums = query.new_empty(tokens, heads, splits, value_size, dtype=torch.float32)
    attend_kernel[spans.shape[0], kv_heads * parts, splits](
        queries[0], queries[-1], keys[0], keys[-1], values,
        rows.tables, spans, firsts, sinks, output, peaks, totals, sums,
        *queries[0].stride()[:2], *queries[-1].stride()[:2],
        *_strides(keys[0]), *_strides(keys[-1]), *_strides(values),
        0 if rows.tables is None else rows.tables.stride(0), kv_heads, scale, softcap or 1.0,
        PAGED=rows.tables is not None, SECOND=both, LATENT=latent, CAPPED=softcap is not None,
        SUNK=sinks is not None, SPLITS=splits, COMPUTE=compute_type(query.dtype),
        GROUP=group, D=queries[0].shape[-1], R=queries[-1].shape[-1], V=value_size,
        ROWS=tile.rows, KEYS=tile.keys, WIDTH_D=_width(queries[0].shape[-1]),
        WIDTH_R=_width(queries[-1].shape[-1]), WIDTH_V=_width(value_size),
        **tile.options,
    )  # fmt: skip
    if splits > 1:
        join_kernel[tokens, heads](
            peaks, totals, sums, sinks, spans, firsts, output,
            SUNK=sinks is not None, SPLITS=splits, KEYS=tile.keys, V=value_size,
            WIDTH_V=_width(value_size), **JOIN_OPTIONS,
        )  # fmt: skip
    return output


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """From block to block, from head to head, from token to token."""
    head, token, _ = rows.stride()[-3:]
    return (rows.stride(0) if rows.ndim == 4 else 0), head, token


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _halves(size: int) -> tuple[int, int]:
    """Keys of 192 or 80 numbers are products of two widths: 128 and 64, or 64 and 16."""
    first = 1 << (size.bit_length() - 1)
    return (first, size - first) if first >= 64 else (size, 0)


@triton.jit
def split_of(first, end, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Tiles of keys from the first one that a query sees, and how many of them a split has."""
    tiles = (end + KEYS - 1) // KEYS - first // KEYS
    return tiles, (tiles + SPLITS - 1) // SPLITS


@triton.jit
def attend_kernel(
    query, second, keys, seconds, values, tables, spans, firsts, sinks,
    output, peaks, totals, sums,
    q_token, q_head, s_token, s_head,
    k_block, k_head, k_token, r_block, r_head, r_token, v_block, v_head, v_token,
    columns, kv_heads, scale, softcap,
    PAGED: tl.constexpr, SECOND: tl.constexpr, LATENT: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, SPLITS: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH_D: tl.constexpr, WIDTH_R: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    span = spans + tl.program_id(0) * 4
    place, query_at = tl.load(span), tl.load(span + 1)
    count, position = tl.load(span + 2), tl.load(span + 3)
    parts = tl.num_programs(1) // kv_heads
    kv_head = tl.program_id(1) // parts
    flat_from = tl.program_id(1) % parts * ROWS
    split = tl.program_id(2)
    padding = count == 0
    count = tl.maximum(count, 1)  # a span of padding has a query that sees no key: zeros
    if flat_from >= count * GROUP:
        return
    flat = flat_from + tl.arange(0, ROWS)
    used = flat < count * GROUP
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    token = (query_at + row).to(tl.int64)
    first = tl.load(firsts + token, mask=used, other=2147483647)
    last_row = tl.minimum(count - 1, (flat_from + ROWS - 1) // GROUP)
    end = tl.where(padding, 0, position + last_row + 1)
    seen = tl.minimum(tl.min(first), end)
    _, size = split_of(seen, end, SPLITS, KEYS)
    begin = (seen // KEYS + split * size) * KEYS
    stop = tl.minimum(begin + size * KEYS, end)
    if SPLITS > 1:  # noqa: SIM102 - one may not join a constant and a value
        if begin >= stop:
            return
    d, r, v = tl.arange(0, WIDTH_D), tl.arange(0, WIDTH_R), tl.arange(0, WIDTH_V)
    own = query + token[:, None] * q_token + head[:, None] * q_head
    q = tl.load(own + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
    if SECOND:
        beside = second + token[:, None] * s_token + head[:, None] * s_head
        r_mask = used[:, None] & (r < R)[None, :]
        q2 = tl.load(beside + r[None, :], mask=r_mask, other=0.0).to(COMPUTE)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for start in range(begin, stop, KEYS):
        at = start + tl.arange(0, KEYS)
        here = (at < stop)[:, None]
        if PAGED:  # a tile lies within a block
            block = tl.load(tables + place.to(tl.int64) * columns + start // 64).to(tl.int64)
            within = (start % 64 + tl.arange(0, KEYS))[:, None]
            k_from, v_from = keys + block * k_block, values + block * v_block
            r_from = seconds + block * r_block
        else:
            from_token = (place + start).to(tl.int64)
            within = tl.arange(0, KEYS)[:, None]
            k_from, v_from = keys + from_token * k_token, values + from_token * v_token
            r_from = seconds + from_token * r_token
        k_at = k_from + kv_head * k_head + within * k_token + d[None, :]
        k = tl.load(k_at, mask=here & (d < D)[None, :], other=0.0).to(COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SECOND:
            r_at = r_from + kv_head * r_head + within * r_token + r[None, :]
            k2 = tl.load(r_at, mask=here & (r < R)[None, :], other=0.0).to(COMPUTE)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
        if LATENT:
            values_here = k
        else:
            v_at = v_from + kv_head * v_head + within * v_token + v[None, :]
            values_here = tl.load(v_at, mask=here & (v < V)[None, :], other=0.0).to(COMPUTE)
        scores *= scale
        if CAPPED:  # tanh(x) is 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        allowed = (at[None, :] >= first[:, None]) & (at[None, :] <= (position + row)[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that see no key so far
        shares = tl.exp(scores - finite[:, None])
        less = tl.exp(peak - finite)
        total = total * less + tl.sum(shares, 1)
        result = result * less[:, None]
        result = tl.dot(shares.to(COMPUTE), values_here, result, input_precision="ieee")
        peak = higher
    to = token * (kv_heads * GROUP) + head
    v_mask = used[:, None] & (v < V)[None, :]
    if SPLITS > 1:
        to = to * SPLITS + split
        tl.store(peaks + to, peak, mask=used)
        tl.store(totals + to, total, mask=used)
        tl.store(sums + to[:, None] * V + v[None, :], result, mask=v_mask)
    else:
        if SUNK:
            sink = tl.load(sinks + head, mask=used, other=0.0)
            higher = tl.maximum(peak, sink)
            less = tl.exp(peak - higher)
            total = total * less + tl.exp(sink - higher)
            result = result * less[:, None]
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        made = result.to(output.dtype.element_ty)
        tl.store(output + to[:, None] * V + v[None, :], made, mask=v_mask)


@triton.jit
def join_kernel(
    peaks, totals, sums, sinks, spans, firsts, output,
    SUNK: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr,
    V: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    end = tl.where(tl.load(spans + token * 4 + 2) == 0, 0, tl.load(spans + token * 4 + 3) + 1)
    first = tl.minimum(tl.load(firsts + token), end)
    tiles, size = split_of(first, end, SPLITS, KEYS)
    in_use = (tiles + size - 1) // tl.maximum(size, 1)  # none of padding
    at = token.to(tl.int64) * tl.num_programs(1) + head
    v = tl.arange(0, WIDTH_V)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((WIDTH_V,), tl.float32)
    for split in range(0, in_use):  # in order
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
    tl.store(output + at * V + v, result.to(output.dtype.element_ty), mask=v < V)
