"""Layouts of parameters in GGUF files that differ from transformers'.

llama.cpp's converter rearranges some tensors for its kernels: rows of queries and keys in pairs,
the halves of latent attention apart, the heads of a linear attention in another order, numbers that
are computed ahead. A `TensorLayout` undoes one of these. The facts stand in llama.cpp's
``conversion/``; the tests write files by the same rules.

Legend: H heads, N rows of a stored tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.loading.plan import Index


@dataclass(frozen=True)
class Part:
    """A part of a stored tensor that has a place of its own in a parameter.

    Attributes:
        rows: of the stored tensor's first dimension; a number takes that dimension away.
        index: where in the parameter.
        transposed: rows of the part are columns of the parameter.
    """

    rows: int | slice
    index: Index = ()
    transposed: bool = False


WHOLE = (Part(slice(None)),)


@dataclass(frozen=True)
class TensorLayout:
    """The way in which one stored tensor fills a parameter, or a part of it.

    Attributes:
        parts: of the stored tensor, by the configuration and the number of its rows.
        order: ``(N,)`` the stored row that each row of the part is, by the same; None: the same.
        columns: likewise of columns.
        value: what the parameter's numbers are, by the stored ones.
    """

    parts: Callable[[Any, int], Iterator[Part]] | None = None
    order: Callable[[Any, int], Tensor] | None = None
    columns: Callable[[Any, int], Tensor] | None = None
    value: Callable[[Tensor], Tensor] | None = None


AS_IT_IS = TensorLayout()


def _halves_of(heads: str) -> Callable[[Any, int], Tensor]:
    """Rows that turn together lie side by side in the file, half a head apart in the network."""

    def order(config: Any, rows: int) -> Tensor:
        count = getattr(config, heads)
        if rows % (2 * count):
            raise ValueError(f"{rows} rows are not pairs in {count} heads")
        return torch.arange(rows).view(count, -1, 2).transpose(1, 2).flatten()

    return order


QUERY_PAIRS = TensorLayout(order=_halves_of("num_attention_heads"))
KEY_PAIRS = TensorLayout(order=_halves_of("num_key_value_heads"))
NORM_OF_ONE_MORE = TensorLayout(value=lambda stored: stored - 1)
"""The file has the norm's weight with the 1 added that the network adds."""
DECAY = TensorLayout(value=lambda stored: torch.log(-stored))
"""The file has the negative exponential of the network's logarithm."""


def nth(number: int) -> TensorLayout:
    """Rows that are a part of a parameter, behind as many parts of the same size."""

    def parts(_: Any, rows: int) -> Iterator[Part]:
        yield Part(slice(None), (slice(number * rows, (number + 1) * rows),))

    return TensorLayout(parts=parts)


def _latent(config: Any, head: int) -> tuple[int, int, int]:
    """Return the begin of a head's keys, of its values, and their end among the rows of
    ``kv_b_proj``."""
    start = head * (config.qk_nope_head_dim + config.v_head_dim)
    middle = start + config.qk_nope_head_dim
    return start, middle, middle + config.v_head_dim


def latent_keys(config: Any, heads: int) -> Iterator[Part]:
    """``(H, rank, nope)`` in the file."""
    for head in range(heads):
        start, middle, _ = _latent(config, head)
        yield Part(head, (slice(start, middle),), transposed=True)


def latent_values(config: Any, heads: int) -> Iterator[Part]:
    """``(H, v, rank)`` in the file."""
    for head in range(heads):
        _, middle, end = _latent(config, head)
        yield Part(head, (slice(middle, end),))


def _linear_widths(config: Any) -> tuple[int, int, int]:
    """Key heads of a linear attention, and rows of a key and of all values of each."""
    heads = config.linear_num_key_heads
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    return heads, config.linear_key_head_dim, values


def grouped_qkv(config: Any, rows: int) -> Iterator[Part]:
    """All queries, all keys, all values in the file; by key head, gates behind, in the network."""
    heads, key, value = _linear_widths(config)
    if rows != heads * (2 * key + value):
        raise ValueError(f"the configuration says {heads * (2 * key + value)} rows")
    for head in range(heads):
        start = head * 2 * (key + value)
        for width, first in ((key, 0), (key, heads * key), (value, 2 * heads * key)):
            own = slice(first + head * width, first + (head + 1) * width)
            yield Part(own, (slice(start, start + width),))
            start += width


def grouped_gates(config: Any, rows: int) -> Iterator[Part]:
    """The gates that a network has behind the parts of `grouped_qkv`."""
    heads, key, value = _linear_widths(config)
    if rows != heads * value:
        raise ValueError(f"the configuration says {heads * value} rows")
    for head in range(heads):
        start = head * 2 * (key + value) + 2 * key + value
        yield Part(slice(head * value, (head + 1) * value), (slice(start, start + value),))


def _tiled(config: Any, width: int) -> Tensor:
    """Value heads by key head in the network; the first of each key head, the second, ... in the
    file. `width`: rows of a head."""
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    return torch.arange(each * heads * width).view(each, heads, width).transpose(0, 1).flatten()


def _tiled_rows(config: Any, rows: int) -> Tensor:
    """The order of rows of values alone, of values behind queries and keys, or of one number a
    head."""
    heads, key, _ = _linear_widths(config)
    values = config.linear_num_value_heads
    before = 0 if rows == values else rows - values * config.linear_value_head_dim
    if before not in (0, 2 * heads * key):
        raise ValueError(f"{rows} rows are not those of {values} value heads")
    width = (rows - before) // values
    return torch.cat([torch.arange(before), _tiled(config, width) + before])


TILED_HEADS = TensorLayout(order=_tiled_rows)
TILED_COLUMNS = TensorLayout(columns=_tiled_rows)
TILED_DECAY = TensorLayout(order=_tiled_rows, value=DECAY.value)
