"""A prompt's layers other than its experts, by the compiled library: attention, linear, norms.

The arithmetic is in kernels/cpu/attention.cpp, linear.cpp and norms.h; the plain references of the
norms and of the rotation are `apply_norm` and `rotate` of moe/describe/parts.py. A row's bits
depend neither on the other rows of a call nor on the number of threads.

Legend: T new tokens, L tokens of the sequence with them, Q query heads, N key/value heads, D key
size, V value size, H hidden.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.decode import HeadsRecord, NormRecord
from kernels.cpu.interface import (
    DTYPES,
    NUMBER,
    POINTER,
    SIZE,
    Record,
    check_done,
    declare,
    floats,
    pointers,
    sizes,
)
from kernels.cpu.kv import FormatRecord, RowFormat


class _AttendRecord(Record, struct="Attend"):
    _fields_ = (
        *pointers("q", "k", "v", "out", "begin", "sinks", "k_table", "v_table"),
        *sizes("q_head", "q_row", "k_head", "k_row", "v_head", "v_row"),
        *sizes("heads", "kv_heads", "key_size", "value_size", "queries", "keys"),
        *floats("scale", "softcap"),
        *((name, FormatRecord) for name in ("k_format", "v_format")),
    )


class BlockRows(NamedTuple):
    """Keys and values of one layer of a sequence, in blocks (`kernels.cpu.kv`).

    Attributes:
        tables: addresses of the tables of keys and of values.
        heads: N.
        sizes: D and V.
        tokens: L.
        formats: of keys and of values.
    """

    tables: tuple[int, int]
    heads: int
    sizes: tuple[int, int]
    tokens: int
    formats: tuple[RowFormat, RowFormat]


class NativeAttention:
    """Attention of one sequence's new tokens in float32, without a matrix of scores."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, {"moe_attend": (NUMBER, (POINTER, NUMBER))})
        self._attend = library.moe_attend

    @staticmethod
    def supports(*tensors: Tensor) -> bool:
        """Return whether the library reads such queries, keys and values where they lie."""
        return all(
            t.device.type == "cpu"
            and t.dtype == torch.float32
            and t.stride(-1) == 1
            and not (t.requires_grad and torch.is_grad_enabled())
            for t in tensors
        )

    def attend(
        self,
        q_QTD: Tensor,
        k_NLD: Tensor,
        v_NLV: Tensor,
        first_T: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """``(T, Q, V)``: each of the last T tokens attends to all keys from ``first_T`` to its own.

        Args:
            first_T: int64 index of the first key that each token sees, at most its own position.
            softcap: scores s become ``softcap * tanh(s / softcap)`` after scaling.
            sinks_Q: attention sinks: the score of one more key of each head, without a value.
        """
        (kv_heads, keys, size), values = k_NLD.shape, v_NLV.shape[-1]
        return self._run(
            q_QTD, first_T, scale, softcap, sinks_Q, (k_NLD.data_ptr(), v_NLV.data_ptr()),
            (None, None), (*k_NLD.stride()[:2], *v_NLV.stride()[:2]),
            (kv_heads, size, values, keys), (RowFormat(), RowFormat()),
        )  # fmt: skip

    def attend_blocks(
        self,
        q_QTD: Tensor,
        rows: BlockRows,
        first_T: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """The same of keys and values in blocks."""
        return self._run(
            q_QTD, first_T, scale, softcap, sinks_Q, (None, None), rows.tables, (0, 0, 0, 0),
            (rows.heads, *rows.sizes, rows.tokens), rows.formats,
        )  # fmt: skip

    def _run(
        self,
        q_QTD: Tensor,
        first_T: Tensor,
        scale: float,
        softcap: float | None,
        sinks_Q: Tensor | None,
        rows: tuple[int | None, int | None],
        tables: tuple[int | None, int | None],
        strides: tuple[int, ...],
        shape: tuple[int, int, int, int],
        formats: tuple[RowFormat, RowFormat],
    ) -> Tensor:
        """
        Args:
            strides: of keys, then of values, from head to head and from row to row.
            shape: N, D, V and L.
        """
        (heads, queries, _), (kv_heads, size, values, keys) = q_QTD.shape, shape
        out_TQV = torch.empty(queries, heads, values, dtype=torch.float32)
        sinks_Q = None if sinks_Q is None else sinks_Q.detach().float().contiguous()
        first_T = first_T.contiguous()
        record = _AttendRecord(
            q_QTD.data_ptr(), *rows, out_TQV.data_ptr(),
            first_T.data_ptr(), None if sinks_Q is None else sinks_Q.data_ptr(), *tables,
            *q_QTD.stride()[:2], *strides, heads, kv_heads, size, values, queries, keys,
            scale, softcap or 0.0, *(FormatRecord(*form) for form in formats),
        )  # fmt: skip
        check_done(self._attend(ctypes.addressof(record), torch.get_num_threads()))
        return out_TQV


class NativeLinear:
    """``x W^T + b`` of whole weights, in float32; bf16 times bf16 uses the CPU's bf16 dot products,
    where it has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        matrix = POINTER, NUMBER
        arguments = *matrix, *matrix, POINTER, SIZE, SIZE, SIZE, POINTER, NUMBER
        declare(library, {"moe_linear": (None, arguments)})
        self._linear = library.moe_linear

    @staticmethod
    def supports(x: Tensor, weight: Tensor) -> bool:
        """Return whether the library reads such activations and weights."""
        return (
            x.device.type == weight.device.type == "cpu"
            and x.dtype in (torch.float32, torch.bfloat16)
            and weight.dtype in DTYPES
            and weight.is_contiguous()
            and weight.numel() > 0
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        )

    def linear(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """``(..., N)`` of ``(..., K)``, in x's dtype."""
        (width, columns), x = weight_NK.shape, x.contiguous()
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
        bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._linear(
            x.data_ptr(), DTYPES[x.dtype], weight_NK.data_ptr(), DTYPES[weight_NK.dtype],
            None if bias_N is None else bias_N.data_ptr(), x.numel() // columns, width, columns,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


MOST_CHOICES = 1024
"""Numbers of a row that the largest are chosen from."""


class NativeNorms:
    """Norms, rotary positions, largest numbers and draws of float32 rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        norm = None, (POINTER, POINTER, SIZE, SIZE, POINTER, NUMBER)
        turn = None, (POINTER, POINTER, POINTER, SIZE, NUMBER)
        top_k = None, (POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, NUMBER)
        draw = None, (POINTER, POINTER, SIZE, SIZE, POINTER, NUMBER)
        declare(
            library,
            {"moe_norm": norm, "moe_turn": turn, "moe_top_k": top_k, "moe_draw": draw},
        )
        self._norm, self._turn, self._top_k = library.moe_norm, library.moe_turn, library.moe_top_k
        self._draw = library.moe_draw

    @staticmethod
    def supports(x: Tensor) -> bool:
        """Return whether the library takes such rows."""
        kept = x.requires_grad and torch.is_grad_enabled()
        return x.device.type == "cpu" and x.dtype == torch.float32 and not kept

    def norm(self, norm: NormRecord, x: Tensor) -> Tensor:
        """The norm of each row of ``(..., H)``."""
        x, width = x.contiguous(), x.shape[-1]
        out, threads = torch.empty_like(x), torch.get_num_threads()
        rows = x.numel() // width
        self._norm(addressof(norm), x.data_ptr(), rows, width, out.data_ptr(), threads)
        return out

    def turn(self, heads: HeadsRecord, rows: Tensor, positions_T: Tensor) -> None:
        """Norm and rotate contiguous rows, ``(T, heads, size)``, to their positions, in place."""
        assert rows.is_contiguous()
        count, threads = len(positions_T), torch.get_num_threads()
        self._turn(addressof(heads), rows.data_ptr(), positions_T.data_ptr(), count, threads)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``(..., k)`` values and int64 ids of the largest of ``(..., N)``, the largest first: NaN
        before all numbers, of equal ones the lower id. N is at most `MOST_CHOICES`."""
        x, n = x.contiguous(), x.shape[-1]
        values = torch.empty(*x.shape[:-1], k)
        ids = torch.empty_like(values, dtype=torch.int64)
        self._top_k(
            x.data_ptr(), x.numel() // n, n, k, values.data_ptr(), ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return values, ids

    def draw(self, probabilities_TV: Tensor, uniform_TV: Tensor) -> Tensor:
        """``(T,)`` int64 ids; see `kernels.draw_rows`."""
        rows, n = probabilities_TV.shape
        p, ids = probabilities_TV.contiguous(), torch.empty(rows, dtype=torch.int64)
        places = p.data_ptr(), uniform_TV.data_ptr()
        self._draw(*places, rows, n, ids.data_ptr(), torch.get_num_threads())
        return ids
