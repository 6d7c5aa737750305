"""Attention of single rows to sequences whose keys and values lie in buffers of their own.

Where a row's keys and values are is told by a table in device memory (`places`), so that a captured
graph follows sequences that come, go and grow. Keys are split between programs by the row's own
length, and what the splits give is joined in their order: a row's bits do not depend on company.

Shape legend: B rows (position -1: a row of padding, which writes and sees nothing), Q query heads,
N key/value heads, D and V sizes of keys and values, R size of second keys, C caches (one a layer).
`places` is (B, 2 + 2 * C) int64: position, capacity of the buffers, then of each cache where keys
(N, capacity, D) and values (N, capacity, V) begin. A latent cache holds keys (1, capacity, D) that
are the values too, and second keys (1, capacity, R).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.triton.attention_kernels import attend_kernel, join_kernel, store_kernel
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
        window: only the last so many keys are seen; None for all.
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
