"""Keys and values in blocks of tokens, with a precision of their own (`memory.kv_bits`).

A `BlockKVCache` keeps its rows in blocks of 64 tokens, which compiled attention and compiled decode
steps read directly: nothing is expanded, and a growing sequence copies nothing. Rows are coded when
they are written, one by one, so their bits depend on no other row and on no cut of a prompt. A fork
shares the whole blocks of its source, which neither writes again, and copies the last one if that
is not full; a block is freed with the last sequence that lists it.
Legend: N key/value heads, D key size, V value size, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK, NativeKV
from moe.network.kv_cache import CODED, KVCache, KVFormat, LayerKey, RowLayout, StoredBlock


class Shape(NamedTuple):
    """N, D and V of a layer."""

    heads: int
    key_size: int
    value_size: int


@dataclass(eq=False)
class KVBlock:
    """Rows of 64 tokens of one or more sequences: of each layer, keys and behind them values.

    Attributes:
        holders: the sequences that list it, the one that it counts for first.
    """

    rows: dict[LayerKey, Tensor]
    holders: dict[BlockHolder, None] = field(default_factory=dict)


@dataclass(eq=False)
class BlockHolder:
    """What a sequence has of blocks, beside the sequence so that it outlives it.

    Attributes:
        blocks: in the order of tokens.
        shared: how many of them count for another sequence.
        kept: the prefix cache keeps the sequence: what it lists counts for it.
    """

    blocks: list[KVBlock] = field(default_factory=list)
    shared: int = 0
    kept: bool = False

    def add(self, block: KVBlock) -> None:
        self.shared += bool(block.holders)
        block.holders[self] = None
        self.blocks.append(block)

    def keep(self, kept: bool) -> None:
        self.kept = kept
        for block in self.blocks:
            self._settle(block)

    def sole_tokens(self, length: int, block_tokens: int) -> int:
        """Of a sequence of this length, tokens whose memory no other has."""
        others = sum(len(block.holders) > 1 for block in self.blocks)
        return max(length - block_tokens * others, 0)

    def release(self) -> None:
        """List no blocks any more; each counts for another sequence that lists it."""
        self.kept = False
        for block in self.blocks:
            if len(block.holders) > 1:
                others = [holder for holder in block.holders if holder is not self]
                _count_for(next((holder for holder in others if holder.kept), others[0]), block)
            del block.holders[self]
        self.blocks.clear()

    def _settle(self, block: KVBlock) -> None:
        if not next(iter(block.holders)).kept:
            kept = (holder for holder in block.holders if holder.kept)
            if (holder := next(kept, None)) is not None:
                _count_for(holder, block)


def _count_for(holder: BlockHolder, block: KVBlock) -> None:
    """Let a block count for this one of its holders."""
    before = next(iter(block.holders))
    if before is not holder:
        before.shared += 1
        holder.shared -= 1
        block.holders = {holder: None} | block.holders


class BlockPool:
    """Owns the blocks of all sequences of a model.

    Args:
        kernel: writes and reads rows.
        form: how rows are stored.
    """

    def __init__(self, kernel: NativeKV, form: KVFormat) -> None:
        self.kernel, self.form = kernel, form
        self._alive: WeakSet[KVBlock] = WeakSet()

    @property
    def held_tokens(self) -> int:
        """Tokens that the blocks in use have room for; a shared block counts once."""
        return BLOCK * len(self._alive)

    def new_block(self) -> KVBlock:
        block = KVBlock({})
        self._alive.add(block)
        return block

    def new_rows(self, shape: Shape) -> Tensor:
        """Memory for a layer's rows of one block."""
        return torch.empty(BLOCK * self.form.token_bytes(*shape), dtype=torch.uint8)

    def new_cache(self, capacity: int) -> BlockKVCache:
        """A new sequence that will hold at most ``capacity`` tokens."""
        return BlockKVCache(capacity, self)


class BlockKVCache(KVCache):
    """Keys and values of one sequence in blocks. Rows that are no keys and values of attention (an
    indexer's) stay in float32 buffers.

    Args:
        capacity: tokens the sequence may ever have.
        pool: owns the blocks.

    Attributes:
        blocks: in the order of tokens; others may list those at the start too.
    """

    def __init__(self, capacity: int, pool: BlockPool) -> None:
        super().__init__(capacity)
        self._pool, self.form = pool, pool.form
        self._holder = BlockHolder()
        self.blocks = self._holder.blocks
        finalize(self, self._holder.release).atexit = False
        self._shared = 0  # blocks at the start that others list too: never written again
        self._shapes: dict[LayerKey, Shape] = {}
        self._tables = np.zeros((0, 2, 0), np.int64)  # of each layer: where keys and values begin
        self._pointers: tuple[tuple[LayerKey, ...], np.ndarray] | None = None

    @property
    def layers(self) -> list[LayerKey]:
        return [*self._shapes, *super().layers]

    @property
    def block_tokens(self) -> int:
        return BLOCK

    @property
    def fork_tokens(self) -> int:
        return BLOCK

    @property
    def shared_tokens(self) -> int:
        return BLOCK * self._holder.shared

    @property
    def sole_tokens(self) -> int:
        return self._holder.sole_tokens(self.length, BLOCK)

    def keep(self, kept: bool) -> None:
        self._holder.keep(kept)

    @property
    def token_bytes(self) -> int:
        own = sum(self.form.token_bytes(*shape) for shape in self._shapes.values())
        return own + super().token_bytes

    def write(self, layer: LayerKey, keys: Tensor, values: Tensor, skip: int = 0) -> None:
        if isinstance(layer, tuple):
            super().write(layer, keys, values, skip)
            return
        start = self.length + skip
        assert start >= self._shared * BLOCK, "shared blocks are never written"
        self.reserve(start + keys.shape[2])
        if layer not in self._shapes:
            self._shapes[layer] = Shape(keys.shape[1], keys.shape[3], values.shape[3])
            self._place()
        for rows, table, form in zip((keys, values), self._table(layer), self.form, strict=True):
            self._pool.kernel.write(rows[0], table, start, form)

    def read(self, layer: LayerKey, end: int) -> tuple[Tensor, Tensor]:
        """Copies ``(1, N, end, D)`` of keys and values, in float32."""
        if layer not in self._shapes:
            return super().read(layer, end)
        heads, *sizes = self._shapes[layer]
        keys, values = (
            self._pool.kernel.read(table, heads, size, end, form)[None]
            for table, size, form in zip(self._table(layer), sizes, self.form, strict=True)
        )
        return keys, values

    def in_blocks(self, layer: LayerKey, end: int) -> BlockRows | None:
        """Where the first ``end`` tokens of a layer lie, for compiled attention."""
        if layer not in self._shapes:
            return None
        heads, *sizes = self._shapes[layer]
        first, second = self._table(layer)
        return BlockRows((first, second), heads, (sizes[0], sizes[1]), end, self.form)

    def reserve(self, end: int) -> None:
        room = self.room
        super().reserve(end)
        if self.room > room:
            self._pointers = None
        if end > len(self.blocks) * BLOCK:
            while end > len(self.blocks) * BLOCK:
                self._holder.add(self._pool.new_block())
            self._place()

    def tables(self, layers: Sequence[LayerKey]) -> np.ndarray:
        assert self.length >= self._shared * BLOCK, "shared blocks are never written"
        wanted = tuple(layers)
        if self._pointers is None or self._pointers[0] != wanted:
            found = np.zeros((len(wanted), 2), np.int64)
            in_buffers = [layer for layer in wanted if layer not in self._shapes]
            others = iter(super().tables(in_buffers) if in_buffers else ())
            for row, layer in zip(found, wanted, strict=True):
                row[:] = self._table(layer) if layer in self._shapes else next(others)
            self._pointers = wanted, found
        return self._pointers[1]

    def fork(self, capacity: int, length: int) -> BlockKVCache:
        assert length <= self.length
        assert length == self.longest_fork(length)
        copy = self._pool.new_cache(capacity)
        whole = length // BLOCK
        copy._shapes = dict(self._shapes)
        for block in self.blocks[:whole]:
            copy._holder.add(block)
        copy._shared, self._shared = whole, max(whole, self._shared)
        if length % BLOCK:
            last = self._pool.new_block()
            last.rows = {key: rows.clone() for key, rows in self.blocks[whole].rows.items()}
            copy._holder.add(last)
        copy._place()
        self.copy_buffers(copy, length)
        copy.length = length
        self.copy_states(copy)
        return copy

    def stored_block(self, at: int) -> StoredBlock:
        """As `KVCache.stored_block`: rows of attention as they are kept, without a copy."""
        found, rows = super().stored_block(at), self.blocks[at].rows
        own = {layer: RowLayout(CODED, *shape) for layer, shape in self._shapes.items()}
        return StoredBlock(own | found.layout, [*(rows[layer] for layer in own), *found.rows])

    def append_block(self, stored: StoredBlock, device: torch.device | None = None) -> bool:
        coded: dict[LayerKey, Tensor] = {}
        rest = StoredBlock({}, [])
        for (layer, layout), rows in zip(stored.layout.items(), stored.rows, strict=True):
            if layout.form == CODED:
                coded[layer] = rows
            else:
                rest.layout[layer] = layout
                rest.rows.append(rows)
        shapes = {layer: Shape(*stored.layout[layer][1:]) for layer in coded}
        sizes = [BLOCK * self.form.token_bytes(*shape) for shape in shapes.values()]
        if [rows.numel() for rows in coded.values()] != sizes or not all(sizes):
            return False
        made = self._rows_of(rest, device)
        if made is None or (self.length and shapes != self._shapes):
            return False
        self._shapes = shapes
        super().reserve(self.length + BLOCK)
        block = self._pool.new_block()
        block.rows = coded
        self._holder.add(block)
        self._place()
        self._write_block(made)
        return True

    def _place(self) -> None:
        """Give every block memory for every layer, and list where it is."""
        layers, count = len(self._shapes), len(self.blocks)
        if self._tables.shape[0] < layers or self._tables.shape[2] < count:
            room = self._tables.shape[2]
            if room < count:
                room = max(count, 2 * room, 16)
            tables = np.zeros((layers, 2, room), np.int64)
            old = self._tables.shape
            tables[: old[0], :, : old[2]] = self._tables
            self._tables, self._pointers = tables, None
        for index, (layer, shape) in enumerate(self._shapes.items()):
            table = self._tables[index]
            keys = BLOCK * shape.heads * self.form.keys.row_bytes(shape.key_size)
            for at in range(count - 1, -1, -1):
                if table[0, at]:
                    break
                rows = self.blocks[at].rows
                if layer not in rows:
                    rows[layer] = self._pool.new_rows(shape)
                table[:, at] = rows[layer].data_ptr(), rows[layer].data_ptr() + keys

    def _table(self, layer: LayerKey) -> tuple[int, int]:
        """Addresses of the lists of a layer's keys and of its values."""
        index = list(self._shapes).index(layer)
        first, stride = self._tables[index].ctypes.data, self._tables.strides[1]
        return first, first + stride
