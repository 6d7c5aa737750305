"""Keys and values in blocks of tokens, with a precision of their own (`memory.kv_bits`).

A `BlockKVCache` keeps its rows in blocks of 64 tokens, which attention kernels and fused decode
steps read directly: nothing is expanded, and a growing sequence copies nothing. Rows are coded when
they are written, one by one, so their bits depend on no other row and on no cut of a prompt. A fork
shares the whole blocks of its source, which neither writes again, and copies the last one if that
is not full; a block is freed with the last sequence that lists it.

Where the rows of blocks lie is the business of a `BlockMemory`: `HostBlocks` allocates them one by
one and lists their addresses for compiled code; `moe.network.device_blocks.DeviceBlocks` has all of
them in one piece on a GPU and knows them by number.
Legend: N key/value heads, D key size, V value size, T new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK, NativeKV
from moe.network.kv_cache import KVCache, KVFormat, LayerKey, RowsPass


class Shape(NamedTuple):
    """N, D and V of a layer."""

    heads: int
    key_size: int
    value_size: int


@dataclass(eq=False)
class KVBlock:
    """Rows of 64 tokens of one or more sequences: of each layer, keys and behind them values.

    Attributes:
        number: among the blocks in use.
        rows: of each layer the bytes, as far as somebody has asked for them.
        holders: the sequences that list it, the one that it counts for first.
    """

    number: int
    rows: dict[LayerKey, Tensor] = field(default_factory=dict)
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


class BlockMemory(Protocol):
    """Where the rows of blocks lie.

    Attributes:
        form: how rows are stored.
        counts_blocks: there are only so many blocks, so that sequences count by blocks.
    """

    form: KVFormat
    counts_blocks: bool

    def take(self) -> int:
        """The number of a new block."""

    def give_back(self, number: int) -> None:
        """The block is not used any more."""

    def new_rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        """The bytes of a layer's rows of a block: of keys (N, 64, D), then of values."""

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """Store ``(1, N, T, D)`` and ``(1, N, T, V)`` from token ``start`` on."""

    def read(self, cache: BlockKVCache, layer: LayerKey, end: int) -> tuple[Tensor, Tensor]:
        """Copies ``(1, N, end, D)`` of keys and values."""

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        """See `KVCache.begin_pass`."""


class HostBlocks:
    """Blocks in main memory, allocated one by one; see `BlockMemory`.

    Args:
        kernel: writes and reads rows.
    """

    counts_blocks = False

    def __init__(self, kernel: NativeKV, form: KVFormat) -> None:
        self._kernel, self.form = kernel, form

    def take(self) -> int:
        return 0  # found by address

    def give_back(self, number: int) -> None:
        """Its rows end with it."""

    def new_rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        return torch.empty(BLOCK * self.form.token_bytes(*shape), dtype=torch.uint8)

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        tables = cache.layer_tables(layer)
        for rows, table, form in zip((keys, values), tables, self.form, strict=True):
            self._kernel.write(rows[0], table, start, form)

    def read(self, cache: BlockKVCache, layer: LayerKey, end: int) -> tuple[Tensor, Tensor]:
        heads, *sizes = cache.shapes[layer]
        keys, values = (
            self._kernel.read(table, heads, size, end, form)[None]
            for table, size, form in zip(cache.layer_tables(layer), sizes, self.form, strict=True)
        )
        return keys, values

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> None:
        """Compiled code takes one sequence at a time."""


class BlockPool:
    """Owns the blocks of all sequences of a model.

    Args:
        memory: where their rows lie.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self.memory, self.form = memory, memory.form
        self._alive: WeakSet[KVBlock] = WeakSet()

    @property
    def held_tokens(self) -> int:
        """Tokens that the blocks in use have room for; a shared block counts once."""
        return BLOCK * len(self._alive)

    def new_block(self) -> KVBlock:
        block = KVBlock(self.memory.take())
        finalize(block, self.memory.give_back, block.number).atexit = False
        self._alive.add(block)
        return block

    def rows_of(self, block: KVBlock, layer: LayerKey, shape: Shape) -> Tensor:
        """A layer's rows of a block."""
        if layer not in block.rows:
            block.rows[layer] = self.memory.new_rows(block.number, layer, shape)
        return block.rows[layer]

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
        self._numbers = np.zeros(0, np.int32)
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
    def held_tokens(self) -> int:
        empty = BLOCK * len(self.blocks) - self.length if self.counts_blocks else 0
        return super().held_tokens + max(empty, 0)

    @property
    def counts_blocks(self) -> bool:
        return self.memory.counts_blocks

    @property
    def memory(self) -> BlockMemory:
        """Where its rows lie."""
        return self._pool.memory

    @property
    def block_numbers(self) -> np.ndarray:
        """``(blocks,)`` int32, in the order of tokens."""
        if len(self._numbers) != len(self.blocks):
            self._numbers = np.array([block.number for block in self.blocks], np.int32)
        return self._numbers

    @property
    def sole_tokens(self) -> int:
        others = sum(len(block.holders) > 1 for block in self.blocks)
        return max(self.length - BLOCK * others, 0)

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
        self.reserve(start + keys.shape[2])
        self.give_shape(layer, Shape(keys.shape[1], keys.shape[3], values.shape[3]))
        self.memory.write(self, layer, keys, values, start)

    def give_shape(self, layer: LayerKey, shape: Shape) -> None:
        """Rows of a layer are about to be written."""
        assert self.length >= self._shared * BLOCK, "shared blocks are never written"
        if layer not in self._shapes:
            self._shapes[layer] = shape
            self._place()

    def read(self, layer: LayerKey, end: int) -> tuple[Tensor, Tensor]:
        """Copies ``(1, N, end, D)`` of keys and values: float32, or the GPU's dtype."""
        if layer not in self._shapes:
            return super().read(layer, end)
        return self.memory.read(self, layer, end)

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        return self.memory.begin_pass(sequences, sizes)

    def in_blocks(self, layer: LayerKey, end: int) -> BlockRows | None:
        """Where the first ``end`` tokens of a layer lie, for compiled attention."""
        if layer not in self._shapes or not isinstance(self.memory, HostBlocks):
            return None
        heads, *sizes = self._shapes[layer]
        first, second = self.layer_tables(layer)
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
                row[:] = self.layer_tables(layer) if layer in self._shapes else next(others)
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
            for layer, shape in self._shapes.items():
                rows = self._pool.rows_of(self.blocks[whole], layer, shape)
                self._pool.rows_of(last, layer, shape).copy_(rows)
            copy._holder.add(last)
        copy._place()
        for layer in super().layers:
            copy.write(layer, *super().read(layer, length))
        copy.length = length
        self.copy_states(copy)
        return copy

    @property
    def only_blocks(self) -> bool:
        """Its blocks are all that it keeps of its tokens."""
        return not super().layers and not self._states and self.hidden is None

    @property
    def shapes(self) -> Mapping[LayerKey, Shape]:
        """Of each layer in blocks."""
        return self._shapes

    def append_block(self, shapes: Mapping[LayerKey, Shape], rows: Tensor) -> bool:
        """Go on with a whole block that another sequence has had.

        Args:
            shapes: of its layers, in order.
            rows: bytes of all of them.

        Returns:
            Whether this sequence has such layers and the bytes are as many as they take.
        """
        sizes = [BLOCK * self.form.token_bytes(*shape) for shape in shapes.values()]
        if min(sizes, default=0) <= 0 or sum(sizes) != rows.numel():
            return False
        if self._shapes and dict(shapes) != self._shapes:
            return False
        assert self.length == len(self.blocks) * BLOCK, "only whole blocks are followed"
        self._shapes = dict(shapes)
        super().reserve(self.length + BLOCK)
        block = self._pool.new_block()
        for (layer, shape), own in zip(shapes.items(), rows.split(sizes), strict=True):
            self._pool.rows_of(block, layer, shape).copy_(own)
        self._holder.add(block)
        self._place()
        self.length += BLOCK
        return True

    def packed(self, length: int) -> dict[str, Tensor]:
        """As `KVCache.packed`; ``length`` is a multiple of 64: of attention, whole blocks as they
        are stored, ``(blocks, bytes)``."""
        assert length % BLOCK == 0
        blocks = self.blocks[: length // BLOCK]
        found = {
            ".".join(map(str, ("blocks", layer, *shape))): torch.stack(
                [self._pool.rows_of(block, layer, shape) for block in blocks]
            )
            for layer, shape in self._shapes.items()
        }
        return found | super().packed(length)

    def unpack(self, rows: Mapping[str, Tensor], length: int) -> None:
        own = {name: tensor for name, tensor in rows.items() if name.startswith("blocks.")}
        self.reserve(length)
        taken: dict[int, Tensor] = {}
        for name, tensor in own.items():
            layer, *sizes = map(int, name.split(".")[1:])
            size = BLOCK * self.form.token_bytes(*sizes)
            if tensor.dtype != torch.uint8 or tensor.shape != (length // BLOCK, size):
                raise ValueError(f"layer {layer} has not blocks of {length} tokens in this form")
            taken[layer], self._shapes[layer] = tensor, Shape(*sizes)
        self._shapes = {layer: self._shapes[layer] for layer in sorted(taken)}
        self._place()
        for layer, tensor in taken.items():
            for block, stored in zip(self.blocks, tensor, strict=False):
                self._pool.rows_of(block, layer, self._shapes[layer]).copy_(stored)
        super().unpack({name: rows[name] for name in rows.keys() - own.keys()}, length)

    def _place(self) -> None:
        """Give every block memory for every layer, and list where it is, for compiled code."""
        if not isinstance(self.memory, HostBlocks):
            return
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
                address = self._pool.rows_of(self.blocks[at], layer, shape).data_ptr()
                table[:, at] = address, address + keys

    def layer_tables(self, layer: LayerKey) -> tuple[int, int]:
        """Addresses of the lists of a layer's keys and of its values."""
        index = list(self._shapes).index(layer)
        first, stride = self._tables[index].ctypes.data, self._tables.strides[1]
        return first, first + stride
