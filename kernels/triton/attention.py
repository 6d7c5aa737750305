"""Attention on the GPU over keys and values in blocks: prompts, chunks, decode steps.

One kernel serves them all. A *span* is some successive queries of one sequence; a program takes a
part of a span's queries, with all query heads of one key/value head, and walks over tiles of keys.
Tiles begin at multiples of their size, so that a query's bits do not depend on which queries share
its program: a prompt gets the same bits whole and in chunks. For the same reason the sums over each
`SEGMENT` of keys are made by themselves and joined in order. A prompt of few queries behind many
keys splits them between programs there; one of many queries has programs enough, and each goes on
from segment to segment. Decode steps have spans of one query and split the keys between programs by
that query's own position, so a row's bits do not depend on other rows. `join_kernel` joins what
programs have split, in order. Everything that changes from step to step is read from device memory,
so that CUDA graphs can replay the launches.

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

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import (
    INTERPRETED,
    compute_type,
    overlap_options,
    wait_for_others,
)

BLOCK = 64
"""Tokens of a block."""
DECODE_ROWS = 16
"""Queries times heads of a program of a decode step: what matrix instructions take at least."""
SEGMENT = 128 if INTERPRETED else 2048
"""Keys, from a multiple of it on, that prompts sum before they join; a multiple of `BLOCK`."""
_PROGRAMS = 4 if INTERPRETED else 128  # of a query, where it sees enough keys
_MOST_SPLITS = 32
_SPLIT_BYTES = 64 << 20  # of a prompt's sums, at most


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
    """The tile of a program: query rows and keys, and its launch.

    Attributes:
        rows: queries times query heads of one key/value head.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of a launch for Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


WIDE_SHARED_BYTES = 200 << 10
"""Shared memory of a block of the wide tiles; sm_90 and sm_100 allow 227 KB, sm_80 163, sm_89 and
sm_120 99."""
JOIN_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


def decode_tile(size: int, dtype: torch.dtype) -> KeyTile:
    """Return the tile for spans of one query; ``size`` is the larger of D and V."""
    numbers = (8 << 10) // (1 if dtype.itemsize == 2 else 4)  # of a tile; more would spill
    return KeyTile(DECODE_ROWS, max(16, min(64, numbers // _width(size))), 4, 2)


def decode_splits(group: int, kv_heads: int, size: int, dtype: torch.dtype) -> int:
    """Parts into which a decode step splits the keys of each query.

    Args:
        group: query heads of a key/value head.
        size: the larger of D and V.
    """
    programs = kv_heads * triton.cdiv(group, decode_tile(size, dtype).rows)
    return max(1, min(_MOST_SPLITS, _PROGRAMS // programs))


def prompt_tile(size: int, dtype: torch.dtype, wide: bool | None = None) -> KeyTile:
    """Return the tile for spans of several queries; no tile of halves spills on sm_80, sm_89, sm_90
    and sm_120.

    Args:
        wide: whether a block may have the shared memory of sm_90; None: look.
    """
    if INTERPRETED:
        return KeyTile(64, 64, 4, 1)
    width = _width(size)
    if dtype.itemsize > 2:  # no matrix instructions: few rows, so that sums stay in registers
        return KeyTile(16, max(16, min(64, 2048 // width)), 4, 1)
    if width <= 128 and (_is_wide() if wide is None else wide):
        return KeyTile(128, 64, 8, 3)
    return KeyTile(128 if width <= 128 else 64, 64 if width <= 64 else 32, 8, 2)


@cache
def _is_wide() -> bool:
    """False on sm_80 to sm_89, and on sm_120, which has less than sm_80."""
    if not torch.cuda.is_available():
        return False
    utils = triton.runtime.driver.active.utils
    device = utils.get_device_properties(torch.cuda.current_device())
    return bool(device["max_shared_mem"] >= WIDE_SHARED_BYTES)


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
    most_keys: int = 0,
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
        most_keys: of a sequence; spans of several queries need it.
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
    programs, segments = kv_heads * parts, triton.cdiv(most_keys, SEGMENT)
    if splitting:
        splits, segment = decode_splits(group, kv_heads, widest, query.dtype), 0
    else:
        wide = 4 * tokens * heads * segments * value_size > _SPLIT_BYTES
        few = 2 * programs * spans.shape[0] <= _PROGRAMS and not wide
        splits, segment = segments if few and segments else 1, SEGMENT if segments > 1 else 0
    output = query.new_empty(tokens, heads, value_size, dtype=dtype or torch.float32)
    if splits == 1:
        peaks = totals = sums = output
    else:
        peaks, totals = query.new_empty(2, tokens, heads, splits, dtype=torch.float32).unbind()
        sums = query.new_empty(tokens, heads, splits, value_size, dtype=torch.float32)
    attend_kernel[spans.shape[0], programs, splits](
        queries[0], queries[-1], keys[0], keys[-1], values,
        rows.tables, spans, firsts, sinks, output, peaks, totals, sums,
        *queries[0].stride()[:2], *queries[-1].stride()[:2],
        *_strides(keys[0])[:2], *_strides(keys[-1])[:2], *_strides(values)[:2],
        0 if rows.tables is None else rows.tables.stride(0), kv_heads, scale, softcap or 1.0,
        k_token=keys[0].stride(-2), r_token=keys[-1].stride(-2), v_token=values.stride(-2),
        PAGED=rows.tables is not None, SECOND=both, LATENT=latent, CAPPED=softcap is not None,
        SUNK=sinks is not None, SPLITS=splits if splitting else min(splits, 2), SEGMENT=segment,
        COMPUTE=compute_type(query.dtype),
        GROUP=group, D=queries[0].shape[-1], R=queries[-1].shape[-1], V=value_size,
        ROWS=tile.rows, KEYS=tile.keys, WIDTH_D=_width(queries[0].shape[-1]),
        WIDTH_R=_width(queries[-1].shape[-1]), WIDTH_V=_width(value_size),
        **tile.options, **overlap_options(),
    )  # fmt: skip
    if splits > 1:
        join_kernel[spans.shape[0], most_queries, heads](
            peaks, totals, sums, sinks, spans, firsts, output, splits,
            SUNK=sinks is not None, SPLITS=splits if splitting else 2, SEGMENT=segment,
            KEYS=tile.keys, V=value_size, WIDTH_V=_width(value_size), **JOIN_OPTIONS,
            **overlap_options(),
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


LOG2E = tl.constexpr(1.4426950408889634)
IN_PYTHON = tl.constexpr(INTERPRETED)


@triton.jit
def program_anew():
    """``tl.program_id(1)``, asked for again: what is made of it needs no registers before."""
    if IN_PYTHON:
        return tl.program_id(1)
    else:
        return tl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.y;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def queries_of(program, count, query_at, kv_heads, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return, for a program's rows, the query within its span, its head and its token, and whether
    there is one."""
    parts = tl.num_programs(1) // kv_heads
    flat = program % parts * ROWS + tl.arange(0, ROWS)
    row, head = flat // GROUP, program // parts * GROUP + flat % GROUP
    return row, head, (query_at + row).to(tl.int64), flat < count * GROUP


@triton.jit
def split_of(first, end, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Tiles of keys from the first one that a query sees, and how many of them a split has."""
    tiles = (end + KEYS - 1) // KEYS - first // KEYS
    return tiles, (tiles + SPLITS - 1) // SPLITS


@triton.jit
def joined(peak, total, result, more_peak, more_total, more_result, COLUMN: tl.constexpr):
    """The softmax sums of some keys and of those behind them; `COLUMN`: a peak is one of a row.
    Products are fused where it says so and nowhere else: all who join give the same bits."""
    higher = tl.maximum(peak, more_peak)
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that see no key so far
    less, more = tl.exp2(peak - finite), tl.exp2(more_peak - finite)
    total = tl.fma(more_total, more, total * less)
    if COLUMN:
        less, more = less[:, None], more[:, None]
    return higher, total, tl.fma(more_result, more + tl.zeros_like(more_result), result * less)


@triton.jit
def block_of(tables, place, columns, key, stop, PAGED: tl.constexpr):
    """Return the place of a tile of keys: its block, or where its sequence begins."""
    block = place
    if PAGED:
        at = place.to(tl.int64) * columns + key // 64
        block = tl.load(tables + at, mask=key < stop, other=0)
    return block


@triton.jit
def rows_of(
    rows, block, start, stop, kv_head, block_step, head_step, token_step,
    PAGED: tl.constexpr, COMPUTE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values; zeros beyond ``stop``."""
    near, size = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    if PAGED:  # a tile lies within a block
        rows += block.to(tl.int64) * block_step
        within = start % 64 + near
    else:
        rows += (block + start).to(tl.int64) * token_step
        within = near
    at = rows + kv_head * head_step + within[:, None] * token_step + size[None, :]
    mask = (start + near < stop)[:, None] & (size < SIZE)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def scores_of(
    q, q2, keys, seconds, block, start, stop, kv_head,
    k_block, k_head, k_token, r_block, r_head, r_token,
    PAGED: tl.constexpr, SECOND: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, KEYS: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_R: tl.constexpr,
):  # fmt: skip
    """Products of queries and a tile of keys, and these keys."""
    k = rows_of(
        keys, block, start, stop, kv_head, k_block, k_head, k_token, PAGED, COMPUTE, D, KEYS,
        WIDTH_D,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SECOND:
        k2 = rows_of(
            seconds, block, start, stop, kv_head, r_block, r_head, r_token, PAGED, COMPUTE, R,
            KEYS, WIDTH_R,
        )  # fmt: skip
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
    return scores, k


@triton.jit
def attend_kernel(
    query, second, keys, seconds, values, tables, spans, firsts, sinks,
    output, peaks, totals, sums,
    q_token, q_head, s_token, s_head,
    k_block, k_head, r_block, r_head, v_block, v_head,
    columns, kv_heads, scale, softcap,
    k_token: tl.constexpr, r_token: tl.constexpr, v_token: tl.constexpr,
    PAGED: tl.constexpr, SECOND: tl.constexpr, LATENT: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH_D: tl.constexpr, WIDTH_R: tl.constexpr, WIDTH_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    # The last queries of a prompt see the most keys: they begin first.
    span = spans + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
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
    row, head, token, used = queries_of(tl.program_id(1), count, query_at, kv_heads, GROUP, ROWS)
    first = tl.load(firsts + token, mask=used, other=2147483647)
    last_row = tl.minimum(count - 1, (flat_from + ROWS - 1) // GROUP)
    # All rows see the keys between these.
    seen_from, seen_to = tl.max(tl.where(used, first, 0)), position + flat_from // GROUP + 1
    end = tl.where(padding, 0, position + last_row + 1)
    seen = tl.minimum(tl.min(first), end)
    if SEGMENT == 0:
        _, size = split_of(seen, end, SPLITS, KEYS)
        begin = (seen // KEYS + split * size) * KEYS
        stop = tl.minimum(begin + size * KEYS, end)
    else:
        begin = tl.maximum(seen // KEYS * KEYS, split * SEGMENT)
        stop = tl.minimum((split + 1) * SEGMENT, end)
    # A program that goes on from segment to segment has a second sum: registers are for both, and
    # what it knows of its queries it finds out again.
    JOINS: tl.constexpr = SEGMENT > 0 and SPLITS == 1
    segment, segments = 0, 1
    if JOINS:
        segment, segments = seen // SEGMENT, (end + SEGMENT - 1) // SEGMENT
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
    else:
        q2 = q
    # Scores are powers of two, and become such in one operation with the softmax's difference.
    if CAPPED:
        bend, unit = 2.0 * LOG2E * scale / softcap, LOG2E * softcap
    else:
        bend, unit = 1.0, LOG2E * scale
    all_peak = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_result = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for at_segment in range(segment, segments):
        if JOINS:
            begin = tl.maximum(seen // KEYS * KEYS, at_segment * SEGMENT)
            stop = tl.minimum((at_segment + 1) * SEGMENT, end)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, WIDTH_V), tl.float32)
        block = block_of(tables, place, columns, begin, stop, PAGED)
        for start in range(begin, stop, KEYS):
            here = block
            # A block is asked for before its keys are: loads must not wait for two rounds.
            block = block_of(tables, place, columns, start + KEYS, stop, PAGED)
            scores, k = scores_of(
                q, q2, keys, seconds, here, start, stop, kv_head,
                k_block, k_head, k_token, r_block, r_head, r_token,
                PAGED, SECOND, COMPUTE, D, R, KEYS, WIDTH_D, WIDTH_R,
            )  # fmt: skip
            if LATENT:
                values_here = k
            else:
                values_here = rows_of(
                    values, here, start, stop, kv_head, v_block, v_head, v_token,
                    PAGED, COMPUTE, V, KEYS, WIDTH_V,
                )  # fmt: skip
            if CAPPED:  # tanh(x) is 1 - 2 / (exp(2 x) + 1)
                scores = 1.0 - 2.0 / (tl.exp2(scores * bend) + 1.0)
            if (start < seen_from) | (start + KEYS > seen_to):
                at = start + tl.arange(0, KEYS)
                if JOINS:
                    row, _, token, used = queries_of(
                        program_anew(), count, query_at, kv_heads, GROUP, ROWS
                    )
                    first = tl.load(firsts + token, mask=used, other=2147483647)
                below = at[None, :] <= (position + row)[:, None]
                scores = tl.where(below & (at[None, :] >= first[:, None]), scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1) * unit)
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that see no key yet
            shares = tl.exp2(scores * unit - finite[:, None])
            less = tl.exp2(peak - finite)
            total = total * less + tl.sum(shares, 1)
            result = result * less[:, None]
            result = tl.dot(shares.to(COMPUTE), values_here, result, input_precision="ieee")
            peak = higher
        if JOINS:
            all_peak, all_total, all_result = joined(
                all_peak, all_total, all_result, peak, total, result, COLUMN=True
            )
        else:
            all_peak, all_total, all_result = peak, total, result
    peak, total, result = all_peak, all_total, all_result
    if JOINS:
        _, head, token, used = queries_of(program_anew(), count, query_at, kv_heads, GROUP, ROWS)
    to = token * (kv_heads * GROUP) + head
    v_mask = used[:, None] & (v < V)[None, :]
    if SPLITS > 1:
        to = to * tl.num_programs(2) + split
        tl.store(peaks + to, peak, mask=used)
        tl.store(totals + to, total, mask=used)
        tl.store(sums + to[:, None] * V + v[None, :], result, mask=v_mask)
    else:
        if SUNK:
            sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2E
            higher = tl.maximum(peak, sink)
            less = tl.exp2(peak - higher)
            total = tl.fma(total, less, tl.exp2(sink - higher))
            result = result * less[:, None]
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        made = result.to(output.dtype.element_ty)
        tl.store(output + to[:, None] * V + v[None, :], made, mask=v_mask)


@triton.jit
def join_kernel(
    peaks, totals, sums, sinks, spans, firsts, output, splits,
    SUNK: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, KEYS: tl.constexpr,
    V: tl.constexpr, WIDTH_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    span, row, head = spans + tl.program_id(0) * 4, tl.program_id(1), tl.program_id(2)
    token, count = tl.load(span + 1) + row, tl.load(span + 2)
    if row >= tl.maximum(count, 1):
        return
    end = tl.where(count == 0, 0, tl.load(span + 3) + row + 1)
    first = tl.minimum(tl.load(firsts + token), end)
    if SEGMENT > 0:
        begin, stop = first // SEGMENT, (end + SEGMENT - 1) // SEGMENT
    else:
        tiles, size = split_of(first, end, SPLITS, KEYS)
        begin, stop = 0, (tiles + size - 1) // tl.maximum(size, 1)  # none of padding
    at = token.to(tl.int64) * tl.num_programs(2) + head
    v = tl.arange(0, WIDTH_V)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((WIDTH_V,), tl.float32)
    for split in range(begin, stop):  # in order
        own = at * splits + split
        more_peak, more_total = tl.load(peaks + own), tl.load(totals + own)
        part = tl.load(sums + own * V + v, mask=v < V, other=0.0)
        peak, total, result = joined(peak, total, result, more_peak, more_total, part, COLUMN=False)
    if SUNK:
        sink = tl.load(sinks + head) * LOG2E
        higher = tl.maximum(peak, sink)
        less = tl.exp2(peak - higher)
        total = tl.fma(total, less, tl.exp2(sink - higher))
        result = result * less
    result = result / tl.where(total > 0.0, total, 1.0)
    tl.store(output + at * V + v, result.to(output.dtype.element_ty), mask=v < V)
