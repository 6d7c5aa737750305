"""Names and formats of what a sequence keeps: its rows of keys and values, and its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.kv import BLOCK, RowFormat

LayerKey = int | tuple[str, int]
"""An attention layer's number, or what else it keeps: of each token, ``("indexer", layer)``, or of
every few tokens (`moe.kv.cache.KVCache.write_entries`)."""
StateKey = tuple[int, str, int]
"""Layer, kind ("conv", "recurrent", or what `moe.network.own_cache` keeps) and index of a recurrent
state."""
States = Mapping[StateKey, Tensor]
"""Recurrent states of one sequence after one of its tokens; never changed in place."""


class Shape(NamedTuple):
    """Heads, and numbers of a key and of a value, of a layer of attention."""

    heads: int
    key_size: int
    value_size: int


class KVFormat(NamedTuple):
    """The format of stored rows of keys and of values."""

    keys: RowFormat = RowFormat()
    values: RowFormat = RowFormat()
    bounds: bool = False
    """Behind a block's values are the largest and smallest numbers of its keys (kernels/cpu/kv.h),
    two rows of float32 a head."""

    @classmethod
    def of_bits(cls, bits: int, *, bounds: bool = False) -> KVFormat:
        """The format of a precision; codes are those of turned rows."""
        row = RowFormat(bits, turned=bits < 16)
        return cls(row, row, bounds)

    def token_bytes(self, heads: int, key_size: int, value_size: int) -> int:
        """Bytes of a token in one layer."""
        rows = heads * (self.keys.row_bytes(key_size) + self.values.row_bytes(value_size))
        return rows + (-(-2 * heads * key_size * 4 // BLOCK) if self.bounds else 0)

    def bounds_begin(self, heads: int, key_size: int, value_size: int) -> int:
        """Return the begin of a block's bounds in it; 0: there are none."""
        rows = self._replace(bounds=False).token_bytes(heads, key_size, value_size)
        return BLOCK * rows if self.bounds else 0


class RowLayout(NamedTuple):
    """The layout of a layer's rows of a `StoredBlock`: all keys, then all values, head by head.

    Attributes:
        form: `CODED`, or the dtype.
    """

    form: str
    heads: int
    key_size: int
    value_size: int


CODED = "coded"
"""Rows are as a sequence with blocks keeps them, in its `KVFormat`."""


class StoredBlock(NamedTuple):
    """The state of a sequence after 64 tokens, as bytes: for disks and other processes
    (`moe.kv.block_codec`).

    Attributes:
        rows: ``(bytes,)`` uint8 on the CPU, of each layer of the layout.
    """

    layout: dict[LayerKey, RowLayout]
    rows: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(rows.numel() for rows in self.rows)
