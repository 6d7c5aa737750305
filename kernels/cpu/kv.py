"""Rows of keys and values in blocks, written and read by the compiled library (kernels/cpu/kv.h).

Legend: N heads, T tokens, D numbers of a row.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.interface import NUMBER, POINTER, Record, declare, numbers, pointers, sizes

BLOCK = 64
"""Tokens of a block."""
_GROUP = 32  # codes that share a scale


class RowFormat(NamedTuple):
    """The format of a stored row.

    Attributes:
        bits: of a number: 32 (float32), 16 (bf16), or 8 or 4 (codes in groups of 32, which share a
            bf16 scale).
        turned: codes are those of the row turned by a Hadamard matrix, which spreads outliers.
    """

    bits: int = 32
    turned: bool = False

    def row_bytes(self, size: int) -> int:
        """Bytes of a row of ``size`` numbers."""
        if self.bits >= 16:
            return size * self.bits // 8
        return -(-size // _GROUP) * (_GROUP * self.bits // 8 + 2)


class FormatRecord(Record, struct="kv::Format"):
    _fields_ = numbers("bits", "turned")


class _KvRowsRecord(Record, struct="KvRows"):
    _fields_ = (
        *pointers("rows", "table"),
        *sizes("head_stride", "row_stride", "heads", "size", "begin", "count", "room", "bounds"),
        *numbers("bits", "turned"),
    )


class NativeKV:
    """Writes and reads rows; a table is the address of the addresses of a sequence's blocks."""

    def __init__(self, library: ctypes.CDLL) -> None:
        call = None, (POINTER, NUMBER)
        declare(library, {"moe_kv_write": call, "moe_kv_read": call})
        self._write, self._read = library.moe_kv_write, library.moe_kv_read

    def write(
        self, rows_NTD: Tensor, table: int, begin: int, form: RowFormat, bounds: int = 0
    ) -> None:
        """Store float32 rows from token ``begin`` on.

        Args:
            bounds: of keys, where the bounds of a block begin in it (kernels/cpu/kv.h); 0: blocks
                have none.
        """
        if rows_NTD.stride(-1) != 1:
            rows_NTD = rows_NTD.contiguous()
        self._call(self._write, rows_NTD, table, begin, form, bounds)

    def read(
        self, table: int, heads: int, size: int, end: int, form: RowFormat, begin: int = 0
    ) -> Tensor:
        """``(N, end - begin, D)`` float32: the rows of these tokens."""
        out_NTD = torch.empty(heads, end - begin, size)
        self._call(self._read, out_NTD, table, begin, form)
        return out_NTD

    @staticmethod
    def _call(
        call: ctypes._NamedFuncPointer,
        rows: Tensor,
        table: int,
        begin: int,
        form: RowFormat,
        bounds: int = 0,
    ) -> None:
        assert rows.dtype == torch.float32
        heads, count, size = rows.shape
        record = _KvRowsRecord(
            rows.data_ptr(), table, *rows.stride()[:2], heads, size, begin, count, BLOCK, bounds,
            *form,
        )  # fmt: skip
        call(addressof(record), torch.get_num_threads())
