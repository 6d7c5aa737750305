"""Keys and values in blocks of tokens, with a precision of their own (`memory.kv_bits`).

A `BlockKVCache` keeps its rows in blocks of 64 tokens, which attention kernels and fused decode
steps read directly: nothing is expanded, and a growing sequence copies nothing. Rows are coded when
they are written, one by one, so their bits depend on no other row and on no cut of a prompt. A fork
shares the whole blocks of its source, which neither writes again, and copies the last one if that
is not full; a block is freed with the last sequence that lists it.

Where the rows of blocks lie is the business of a `BlockMemory`, which knows blocks by number:
`moe.kv.host_blocks.HostBlocks` gives each pages of its own, whose addresses sequences list for
compiled code; `moe.kv.device_blocks.DeviceBlocks` has all of them in one piece on a GPU.
Legend: N key/value heads, D key size, V value size, T new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK
from moe.kv.cache import KVCache, RowsPass
from moe.kv.layout import KVFormat, LayerKey, RowLayout, Shape, StoredBlock
from moe.kv.ledger import ALL, PART, BlockLedger, BlockTable, KVBlock, Windows
from moe.kv.tables import TableCache
from moe.kv.visibility import HeadsOfLayers, RowVisibility


class BlockAddresses(Protocol):
    """Addresses of the rows of blocks, for compiled code."""

    def address(self, number: int, layer: LayerKey, shape: Shape) -> int:
        """Return the address of a layer's rows of a block."""

    def zeros(self, shape: Shape) -> int:
        """Return the address of rows that stand for a layer's block that a sequence has given
        up."""


class BlockMemory(Protocol):
    """The memory of the rows of blocks.

    Attributes:
        form: how rows are stored.
        row_form: the same for a `RowLayout`.
        counts_blocks: there are only so many blocks, so that sequences count by blocks.
        addresses: None: compiled code does not read it.
    """

    form: KVFormat
    row_form: str
    counts_blocks: bool

    @property
    def addresses(self) -> BlockAddresses | None: ...

    def take(self, shapes: Mapping[LayerKey, Shape]) -> int:
        """The number of a new block.

        Args:
            shapes: of the layers that it will have rows of, as far as they are known.
        """

    def give_back(self, number: int) -> None:
        """The block is not used any more."""

    def give_part_back(self, number: int, heads: HeadsOfLayers) -> None:
        """Rows of these heads of a block, if there still is one, are not used any more."""

    def rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        """The bytes of a layer's rows of a block: of keys (N, 64, D), then of values. They stay
        readable as long as somebody has them."""

    def are_finite(self, rows: Tensor, shape: Shape) -> bool:
        """Return whether the bytes of a layer's rows of a block, as `rows` gives them, are
        numbers."""

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """Store ``(1, N, T, D)`` and ``(1, N, T, V)`` from token ``start`` on."""

    def read(
        self, cache: BlockKVCache, layer: LayerKey, end: int, begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Copies ``(1, N, end - begin, D)`` of keys and values of these tokens."""

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        """See `KVCache.begin_pass`."""


class BlockPool(BlockLedger):
    """Owns the blocks of all sequences of a model.

    Args:
        memory: where their rows lie.
        windows: see `BlockLedger`.
        policy: see `BlockLedger`. One that chooses by bounds of keys wants a form that has them.
        shapes: of the layers, as far as they are known; others are learned when they are written.
    """

    def __init__(
        self,
        memory: BlockMemory,
        windows: Windows | None = None,
        policy: RowVisibility | None = None,
        shapes: Mapping[int, Shape] | None = None,
    ) -> None:
        super().__init__(windows, policy, counts_blocks=memory.counts_blocks)
        self.memory, self.form = memory, memory.form
        self._shapes: dict[int, dict[LayerKey, Shape]] = {group: {} for group in self.shares}
        self._whole: dict[LayerKey, np.ndarray] = {}
        self._whole_of: dict[tuple[LayerKey, ...], np.ndarray] = {}
        for layer, shape in (shapes or {}).items():
            self.learn(layer, shape)

    def take(self, group: int, whole: KVBlock | None = None) -> KVBlock:
        block = super().take(group, whole)
        if whole is None:
            block.number = self.memory.take(self._shapes[group])
            finalize(block, self.memory.give_back, block.number).atexit = False
        else:
            assert self.policy is not None
            block.number, heads = whole.number, self.policy.heads
            finalize(block, self.memory.give_part_back, block.number, heads).atexit = False
        return block

    def whole_heads(self, layers: Sequence[LayerKey]) -> np.ndarray | None:
        """See `KVCache.whole_heads`."""
        if PART not in self.shares:
            return None
        key = tuple(layers)
        if (found := self._whole_of.get(key)) is None:
            flags = [self.whole_flags(layer) for layer in layers]
            places = [own.ctypes.data if own.any() else 0 for own in flags]
            found = np.array(places, np.int64)
            if all(map(len, flags)):  # else some layer is yet to be written
                self._whole_of[key] = found
        return found

    def whole_flags(self, layer: LayerKey) -> np.ndarray:
        """``(N,)`` uint8: 1 for key heads of a layer that attend to all under a policy by heads."""
        assert self.policy is not None
        if layer not in self._whole:
            shape = self._shapes[self.group_of(layer)].get(layer)
            if shape is None:  # not written yet
                return np.zeros(0, np.uint8)
            self._whole[layer] = np.ones(shape.heads, np.uint8)
            for own, heads in self.policy.heads:
                if own == layer:
                    self._whole[layer][list(heads)] = 0
        return self._whole[layer]

    def learn(self, layer: LayerKey, shape: Shape) -> None:
        """Further blocks have rows of this layer."""
        self._shapes[self.group_of(layer)].setdefault(layer, shape)

    def takes(self, shapes: Mapping[LayerKey, Shape]) -> bool:
        """Return whether these are the layers that blocks have, as far as any are known."""
        known = {layer: shape for own in self._shapes.values() for layer, shape in own.items()}
        return not known or known == dict(shapes)

    def new_cache(self, capacity: int) -> BlockKVCache:
        """A new sequence that will hold at most ``capacity`` tokens."""
        return BlockKVCache(capacity, self)


class BlockKVCache(TableCache):
    """Keys and values of one sequence in blocks. Rows that are no keys and values of attention (an
    indexer's) stay in float32 buffers.

    Args:
        capacity: tokens the sequence may ever have.
        pool: owns the blocks.
    """

    _pool: BlockPool

    def __init__(self, capacity: int, pool: BlockPool) -> None:
        super().__init__(capacity, pool)
        self.form = pool.form
        self._shapes: dict[LayerKey, Shape] = {}
        self._numbers = np.zeros(0, np.int32)
        self._tables = np.zeros((0, 2, 0), np.int64)  # of each layer: where keys and values begin
        self._pointers: tuple[tuple[LayerKey, ...], np.ndarray] | None = None

    @property
    def layers(self) -> list[LayerKey]:
        return [*self._shapes, *super().layers]

    @property
    def memory(self) -> BlockMemory:
        """The memory of its rows."""
        return self._pool.memory

    @property
    def block_numbers(self) -> np.ndarray:
        """``(blocks,)`` int32, in the order of tokens."""
        if len(self._numbers) != len(self.blocks):
            self._numbers = np.array([b.number for b in self._lists[ALL].held], np.int32)
        return self._numbers

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
            self._pool.learn(layer, shape)
            self.place()

    def expect(self, layer: LayerKey, shape: Shape, rate: int = 1) -> None:
        """Compiled code is about to write a layer's rows of this shape, which stand for ``rate``
        tokens each."""
        if not isinstance(layer, tuple):
            self.give_shape(layer, shape)
        elif layer not in self._layers:
            keys, values = (torch.empty(1, shape.heads, 0, size) for size in shape[1:])
            if rate > 1:
                self.write_entries(layer, keys, rate, 0)
            else:
                super().write(layer, keys, values)

    def read(self, layer: LayerKey, end: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Copies ``(1, N, end - begin, D)`` of keys and values: float32, or the GPU's dtype."""
        if layer not in self._shapes:
            return super().read(layer, end, begin)
        return self.memory.read(self, layer, end, begin)

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        return self.memory.begin_pass(sequences, sizes)

    def in_blocks(self, layer: LayerKey, end: int) -> BlockRows | None:
        """Return where the first ``end`` tokens of a layer lie, for compiled attention."""
        if layer not in self._shapes or self.memory.addresses is None:
            return None
        heads, *sizes = self._shapes[layer]
        first, second = self.layer_tables(layer)
        return BlockRows((first, second), heads, (sizes[0], sizes[1]), end, self.form[:2])

    def whole_heads(self, layers: Sequence[LayerKey]) -> np.ndarray | None:
        return self._pool.whole_heads(layers)

    def seen_mask(self, layer: LayerKey, query: Tensor, keys: Tensor) -> Tensor | None:
        if self._pool.group_of(layer) != ALL:
            return None
        seen = super().seen_mask(layer, query, keys)
        if seen is not None and PART in self._lists:
            seen |= torch.from_numpy(self._pool.whole_flags(layer))[:, None].bool()
        return seen

    def reserve(self, end: int) -> None:
        room = self.room
        super().reserve(end)
        if self.room > room:
            self._pointers = None

    def forget(self, group: int, blocks: np.ndarray) -> None:
        addresses = self.memory.addresses
        for index, (layer, shape) in enumerate(self._shapes.items()):
            if addresses is not None and self._pool.group_of(layer) == group:
                begin = addresses.zeros(shape)
                places = begin, begin + self._key_bytes(shape)
                self._tables[index][:, blocks] = np.array(places)[:, None]

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
        self.share_blocks(copy, length)
        copy._shapes = dict(self._shapes)
        if length % BLOCK:
            self._copy_last_block(copy, length // BLOCK)
        copy.place()
        self.copy_buffers(copy, length)
        copy.length = length
        self.copy_states(copy)
        return copy

    def _copy_last_block(self, copy: BlockKVCache, at: int) -> None:
        """Give a copy the rows of a block that is not full."""
        for layer, shape in self._shapes.items():
            source, own = self._list_of(layer).blocks[at], copy._list_of(layer).blocks[at]
            assert source is not None
            assert own is not None
            rows = self.memory.rows(source.number, layer, shape)
            self.memory.rows(own.number, layer, shape).copy_(rows)

    @property
    def shapes(self) -> Mapping[LayerKey, Shape]:
        """Shapes of the layers in blocks."""
        return self._shapes

    def stored_block(self, at: int) -> StoredBlock:
        """As `KVCache.stored_block`: rows of attention as they are kept."""
        assert self.whole, "it has given up blocks"
        found = super().stored_block(at)
        form, own, rows = self.memory.row_form, dict[LayerKey, RowLayout](), list[Tensor]()
        for layer, shape in self._shapes.items():
            block = self._list_of(layer).blocks[at]
            assert block is not None
            own[layer] = RowLayout(form, *shape)
            rows.append(self.memory.rows(block.number, layer, shape).cpu())
        return StoredBlock(own | found.layout, [*rows, *found.rows])

    def append_block(self, stored: StoredBlock, device: torch.device | None = None) -> bool:
        coded: dict[LayerKey, Tensor] = {}
        rest = StoredBlock({}, [])
        for (layer, layout), rows in zip(stored.layout.items(), stored.rows, strict=True):
            if isinstance(layer, tuple):
                rest.layout[layer] = layout
                rest.rows.append(rows)
            elif layout.form == self.memory.row_form:
                coded[layer] = rows
            else:
                return False
        shapes = {layer: Shape(*stored.layout[layer][1:]) for layer in coded}
        sizes = [BLOCK * self.form.token_bytes(*shape) for shape in shapes.values()]
        if [rows.numel() for rows in coded.values()] != sizes or min(sizes, default=0) <= 0:
            return False
        made = self._rows_of(rest, device)
        if made is None or (self.length and shapes != self._shapes) or not self._pool.takes(shapes):
            return False
        if not all(self.memory.are_finite(rows, shapes[layer]) for layer, rows in coded.items()):
            return False
        self._shapes = shapes
        for layer, shape in shapes.items():
            self._pool.learn(layer, shape)
        KVCache.reserve(self, self.length + BLOCK)  # what is behind windows is kept
        at = len(self.blocks)
        for table in self._lists.values():
            self._take(table)
        self.place()
        for layer, own in coded.items():
            block = self._list_of(layer).blocks[at]
            assert block is not None
            self.memory.rows(block.number, layer, shapes[layer]).copy_(own)
        self._write_block(made)
        return True

    def place(self) -> None:
        """Give every block memory for every layer, and list where it is, for compiled code."""
        addresses = self.memory.addresses
        if addresses is None:
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
            table, keys = self._tables[index], self._key_bytes(shape)
            blocks = self._list_of(layer).blocks
            for at in range(count - 1, -1, -1):
                if table[0, at]:
                    break
                if (block := blocks[at]) is None:
                    found = addresses.zeros(shape)
                else:
                    found = addresses.address(block.number, layer, shape)
                table[:, at] = found, found + keys

    def _list_of(self, layer: LayerKey) -> BlockTable:
        return self._lists[self._pool.group_of(layer)]

    def _key_bytes(self, shape: Shape) -> int:
        """Return the bytes of the keys in a layer's block; values lie after them."""
        return BLOCK * shape.heads * self.form.keys.row_bytes(shape.key_size)

    def layer_tables(self, layer: LayerKey) -> tuple[int, int]:
        """Addresses of the lists of a layer's keys and of its values."""
        index = list(self._shapes).index(layer)
        first, stride = self._tables[index].ctypes.data, self._tables.strides[1]
        return first, first + stride
