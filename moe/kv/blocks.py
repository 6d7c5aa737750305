"""Keys and values in blocks of tokens, with a precision of their own (`memory.kv_bits`).

A `BlockKVCache` keeps its rows in blocks of 64 tokens, which attention kernels and fused decode
steps read directly: nothing is expanded, and a growing sequence copies nothing. Rows are coded when
they are written, one by one, so their bits depend on no other row and on no cut of a prompt. A fork
shares the whole blocks of its source, which neither writes again, and copies the last one if that
is not full; a block is freed with the last sequence that lists it.

Layers that see a window of W last tokens have blocks of their own, which a sequence gives up behind
the window (`Windows`); its tables show zeros there, which no query sees. A sequence whose prompt
will be kept by the prefix cache has them all until it has been read, and so has what the cache
keeps, so that prompts which begin alike can part anywhere (`BlockKVCache.keep_all`). Under a
policy (`moe.kv.visibility`) a sequence gives up blocks of the other layers, too, once its
prompt has been read (`BlockKVCache.prompt_read`); nothing forks from it then. A policy by heads
gives up the rows of some heads of these layers, whose pages are a part of the block: such a part is
listed, shared and given up as a block is, and the tables do not change.

Where the rows of blocks lie is the business of a `BlockMemory`, which knows blocks by number:
`moe.kv.host_blocks.HostBlocks` gives each pages of its own, whose addresses sequences list for
compiled code; `moe.kv.device_blocks.DeviceBlocks` has all of them in one piece on a GPU.
Legend: N key/value heads, D key size, V value size, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK
from moe.kv.cache import KVCache, RowsPass
from moe.kv.layout import KVFormat, LayerKey, RowLayout, Shape, StoredBlock
from moe.kv.visibility import HeadsOfLayers, RowVisibility

ALL = 0
"""The window of layers that see all tokens."""
PART = -1
"""In place of a window: in layers that see all, rows of the heads that a policy by heads limits."""
SLACK = BLOCK
"""Tokens behind a window that a sequence keeps, so that `KVCache.cut` can take back drafts."""


def window_tokens(window: int, length: int, reading: int = 0) -> int:
    """The most tokens that a sequence of this length keeps in layers with a window.

    Args:
        reading: tokens of the passes that read it, beyond a block.
    """
    return min(length, -(-window // BLOCK) * BLOCK + SLACK + BLOCK + reading)


@dataclass(frozen=True)
class Windows:
    """The layers that see no more than their last tokens, and what that saves.

    Attributes:
        of_layer: the window of each such layer.
        token_bytes: of each window, the bytes of a token in its layers.
        shares: the same as parts of a token's bytes in all layers of attention.
    """

    of_layer: Mapping[int, int] = field(default_factory=dict)
    token_bytes: Mapping[int, int] = field(default_factory=dict)
    shares: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, of_layer: Mapping[int, int], layer_bytes: Mapping[int, int]) -> Windows:
        """From the bytes of a token in each layer of attention."""
        sizes = dict.fromkeys(sorted(set(of_layer.values())), 0)
        for layer, window in of_layer.items():
            sizes[window] += layer_bytes[layer]
        total = sum(layer_bytes.values())
        return cls(of_layer, sizes, {window: size / total for window, size in sizes.items()})

    def held_tokens(self, length: int, reading: int = 0) -> int:
        """Memory of a sequence that gives up what is behind windows, in tokens of all layers; see
        `window_tokens`."""
        saved = sum(
            share * (length - window_tokens(window, length, reading))
            for window, share in self.shares.items()
        )
        return length - int(saved)


@dataclass(eq=False)
class KVBlock:
    """64 tokens of one or more sequences, in layers that see equally far; or a `PART` of it.

    Attributes:
        number: by which a `BlockMemory` knows its rows; 0 where another process has them. A part
            has that of its block.
        holders: the sequences that list it, the one that it counts for first.
    """

    number: int = 0
    holders: dict[BlockHolder, None] = field(default_factory=dict)


@dataclass(eq=False)
class BlockHolder:
    """The blocks of a sequence, beside the sequence so that it outlives it.

    Attributes:
        blocks: in the order of tokens; None: given up.
        shared: how many of them count for another sequence.
        kept: the prefix cache keeps the sequence: what it lists counts for it.
        dropped: how many it has given up.
    """

    blocks: list[KVBlock | None] = field(default_factory=list)
    shared: int = 0
    kept: bool = False
    dropped: int = 0

    @property
    def unpaid(self) -> int:
        """Blocks of the sequence whose memory does not count for it."""
        return self.dropped + self.shared

    @property
    def held(self) -> Iterator[KVBlock]:
        """The blocks that it has not given up."""
        return (block for block in self.blocks if block is not None)

    def add(self, block: KVBlock | None) -> None:
        if block is None:
            self.dropped += 1
        else:
            self.shared += bool(block.holders)
            block.holders[self] = None
        self.blocks.append(block)

    def keep(self, kept: bool) -> None:
        self.kept = kept
        for block in self.held:
            self._settle(block)

    @property
    def lent(self) -> int:
        """Blocks that count for it, and that sequences which are not kept list too."""
        own = (block for block in self.held if next(iter(block.holders)) is self)
        return sum(not all(holder.kept for holder in block.holders) for block in own)

    def sole_tokens(self, length: int, block_tokens: int) -> int:
        """Return the tokens of a sequence of this length whose memory no other has."""
        others = sum(len(block.holders) > 1 for block in self.held)
        return max(length - block_tokens * others, 0)

    def empty_tokens(self, length: int, block_tokens: int) -> int:
        """Tokens that its blocks have room for behind a sequence of this length."""
        return max(block_tokens * len(self.blocks) - length, 0)

    def release(self) -> None:
        """List no blocks any more; each counts for another sequence that lists it."""
        self.kept = False
        self.drop(range(len(self.blocks)))

    def drop(self, places: Iterable[int]) -> None:
        """List these blocks no more; each counts for another sequence that lists it."""
        for at in places:
            block, self.blocks[at] = self.blocks[at], None
            if block is None:
                continue
            self.dropped += 1
            if len(block.holders) > 1:
                others = [holder for holder in block.holders if holder is not self]
                _count_for(next((holder for holder in others if holder.kept), others[0]), block)
                self.shared -= 1
            del block.holders[self]

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


class RowsElsewhere:
    """A `BlockMemory` of blocks whose rows another process has: here they are only counted.

    Args:
        counts_blocks: see `BlockMemory`.
    """

    form, row_form, addresses = KVFormat(), "", None

    def __init__(self, *, counts_blocks: bool = False) -> None:
        self.counts_blocks = counts_blocks

    def take(self, shapes: Mapping[LayerKey, Shape]) -> int:
        return 0

    def give_back(self, number: int) -> None:
        """Nothing is here."""

    def give_part_back(self, number: int, heads: HeadsOfLayers) -> None:
        """Nothing is here."""

    def rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        raise AssertionError("rows are elsewhere")

    def are_finite(self, rows: Tensor, shape: Shape) -> bool:
        raise AssertionError("rows are elsewhere")

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        raise AssertionError("rows are elsewhere")

    def read(
        self, cache: BlockKVCache, layer: LayerKey, end: int, begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("rows are elsewhere")

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> None:
        """No pass runs here."""


class BlockPool:
    """Owns the blocks of all sequences of a model.

    Args:
        memory: where their rows lie.
        windows: of layers that see no more than so many last tokens; none where `counts_blocks`:
            there, all layers have the same blocks.
        policy: what decode steps attend to, so that sequences give up the rest; None: all. One that
            chooses by bounds of keys wants a form that has them.
        shapes: of the layers, as far as they are known; others are learned when they are written.

    Attributes:
        shares: of a token's bytes, those of the layers that see so far: `ALL`, and each window; and
            `PART`, if the policy is by heads.
        counts_blocks: see `BlockMemory`.
        block_tokens: tokens of a block.
    """

    block_tokens = BLOCK

    def __init__(
        self,
        memory: BlockMemory,
        windows: Windows | None = None,
        policy: RowVisibility | None = None,
        shapes: Mapping[int, Shape] | None = None,
    ) -> None:
        self.windows, self.policy = windows or Windows(), policy
        assert not (self.windows.of_layer and memory.counts_blocks), "all layers have these blocks"
        self.memory, self.form, self.counts_blocks = memory, memory.form, memory.counts_blocks
        whole = 1 - sum(self.windows.shares.values())
        self.shares = {ALL: whole, **self.windows.shares}
        if policy is not None and policy.by_heads:
            assert not any(self.group_of(layer) for layer, _ in policy.heads)
            self.shares |= {ALL: whole * policy.share, PART: whole * (1 - policy.share)}
        self._alive: dict[int, WeakSet[KVBlock]] = {group: WeakSet() for group in self.shares}
        self._shapes: dict[int, dict[LayerKey, Shape]] = {group: {} for group in self.shares}
        self._whole: dict[LayerKey, np.ndarray] = {}
        self._whole_of: dict[tuple[LayerKey, ...], np.ndarray] = {}
        for layer, shape in (shapes or {}).items():
            self.learn(layer, shape)

    @property
    def held_tokens(self) -> float:
        """Tokens that the blocks in use have room for; a shared block counts once."""
        return sum(BLOCK * self.shares[group] * len(own) for group, own in self._alive.items())

    def group_of(self, layer: LayerKey) -> int:
        """Return how far a layer sees."""
        return self.windows.of_layer.get(layer, ALL) if isinstance(layer, int) else ALL

    def new_block(self, group: int) -> KVBlock:
        """A block that nobody lists yet."""
        block = KVBlock(self.memory.take(self._shapes[group]))
        finalize(block, self.memory.give_back, block.number).atexit = False
        self._alive[group].add(block)
        return block

    def part_of(self, block: KVBlock) -> KVBlock:
        """The `PART` of a new block, which nobody lists yet."""
        assert self.policy is not None
        part = KVBlock(block.number)
        finalize(part, self.memory.give_part_back, block.number, self.policy.heads).atexit = False
        self._alive[PART].add(part)
        return part

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

    def of_another_process(self) -> BlockPool:
        """A pool that counts blocks which a pool like this one has in another process."""
        memory = RowsElsewhere(counts_blocks=self.counts_blocks)
        return BlockPool(memory, self.windows, self.policy)

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
        blocks: of layers that see all tokens, in order; others may list those at the start too.
    """

    def __init__(self, capacity: int, pool: BlockPool) -> None:
        super().__init__(capacity)
        self._pool, self.form = pool, pool.form
        self._holders = {group: BlockHolder() for group in pool.shares}
        self._keeps_all = False
        self.policy = pool.policy
        self._due = False  # the policy gives up some of the prompt
        self._holder = self._holders[ALL]
        self.blocks = self._holder.blocks
        for holder in self._holders.values():
            finalize(self, holder.release).atexit = False
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
        return self._tokens_of([own.unpaid for own in self._holders.values()])

    @property
    def dropped_tokens(self) -> int:
        return self._tokens_of([own.dropped for own in self._holders.values()])

    def _tokens_of(self, blocks: Sequence[int]) -> int:
        """So many blocks of each group, in tokens of all layers."""
        if len(self._holders) == 1:  # of all layers
            return BLOCK * sum(blocks)
        shares = zip(blocks, self._pool.shares.values(), strict=True)
        return int(sum(BLOCK * count * share for count, share in shares))

    @property
    def held_tokens(self) -> int:
        empty = self._holder.empty_tokens(self.length, BLOCK) if self.counts_blocks else 0
        return super().held_tokens + empty

    @property
    def counts_blocks(self) -> bool:
        return self.memory.counts_blocks

    @property
    def memory(self) -> BlockMemory:
        """The memory of its rows."""
        return self._pool.memory

    @property
    def block_numbers(self) -> np.ndarray:
        """``(blocks,)`` int32, in the order of tokens."""
        if len(self._numbers) != len(self.blocks):
            self._numbers = np.array([block.number for block in self._holder.held], np.int32)
        return self._numbers

    @property
    def lent_tokens(self) -> int:
        return self._tokens_of([own.lent for own in self._holders.values()])

    @property
    def sole_tokens(self) -> int:
        return self._holder.sole_tokens(self.length, BLOCK)

    def keep(self, kept: bool) -> None:
        for holder in self._holders.values():
            holder.keep(kept)

    def keep_all(self, keeps: bool) -> None:
        self._keeps_all = keeps

    @property
    def whole(self) -> bool:
        return not any(holder.dropped for holder in self._holders.values())

    def longest_fork(self, length: int) -> int:
        found = super().longest_fork(length)
        for window, holder in self._holders.items():
            if holder.dropped and (window <= ALL or found < holder.dropped * BLOCK + window):
                return 0
        return found

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
            self._place()

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

    def prompt_read(self) -> None:
        super().prompt_read()
        self._due = self._pool.policy is not None

    def whole_heads(self, layers: Sequence[LayerKey]) -> np.ndarray | None:
        return self._pool.whole_heads(layers)

    def seen_mask(self, layer: LayerKey, query: Tensor, keys: Tensor) -> Tensor | None:
        if self._pool.group_of(layer) != ALL:
            return None
        seen = super().seen_mask(layer, query, keys)
        if seen is not None and PART in self._holders:
            seen |= torch.from_numpy(self._pool.whole_flags(layer))[:, None].bool()
        return seen

    def reserve(self, end: int) -> None:
        room = self.room
        super().reserve(end)
        if self.room > room:
            self._pointers = None
        if end > len(self.blocks) * BLOCK or self._due:
            for group, holder in self._holders.items():
                if not self._keeps_all:
                    self._drop_unseen(group, holder)
                while end > len(holder.blocks) * BLOCK:
                    holder.add(self._new_block(group))
            self._place()
            self._due = False

    def _new_block(self, group: int) -> KVBlock:
        """A block behind those of a group. `ALL` comes first."""
        if group != PART:
            return self._pool.new_block(group)
        block = self.blocks[len(self._holders[PART].blocks)]
        assert block is not None, "given up whole under a policy by heads"
        return self._pool.part_of(block)

    def _drop_unseen(self, window: int, holder: BlockHolder) -> None:
        """Give up blocks that no later query of the sequence sees."""
        unseen = self._unseen(window)
        if len(unseen) <= holder.dropped:
            return
        addresses = self.memory.addresses
        for index, (layer, shape) in enumerate(self._shapes.items()):
            if addresses is not None and self._pool.group_of(layer) == window:
                begin = addresses.zeros(shape)
                places = begin, begin + self._key_bytes(shape)
                self._tables[index][:, unseen] = np.array(places)[:, None]
        holder.drop(unseen)

    def _unseen(self, window: int) -> np.ndarray:
        """The blocks that no later query of the sequence sees, in the order of giving them up."""
        length = self.length if self._marked < 0 else min(self.length, self._marked)
        if window > ALL:
            return np.arange(max(length - window - SLACK, 0) // BLOCK)
        policy = self._pool.policy
        if policy is None or self._prompt is None or policy.by_heads != (window == PART):
            return np.arange(0)
        return policy.given_up(self._prompt, max(length - SLACK, 0))

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
        self._share_with(copy, length)
        return copy

    def _share_with(self, copy: BlockKVCache, length: int) -> None:
        """Let an empty sequence list the blocks of the first ``length`` tokens, too."""
        whole = length // BLOCK
        copy._shapes = dict(self._shapes)
        for group, holder in self._holders.items():
            own = copy._holders[group]
            for block in holder.blocks[:whole]:
                own.add(block)
            if length % BLOCK:
                last = copy._new_block(group)
                source = holder.blocks[whole]
                assert source is not None
                for layer, shape in self._shapes.items():
                    if self._pool.group_of(layer) == group:
                        rows = self.memory.rows(source.number, layer, shape)
                        self.memory.rows(last.number, layer, shape).copy_(rows)
                own.add(last)
        copy._shared, self._shared = whole, max(whole, self._shared)
        copy._place()
        self.copy_buffers(copy, length)
        copy.length = length
        self.copy_states(copy)

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
            block = self._holder_of(layer).blocks[at]
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
        super().reserve(self.length + BLOCK)
        for group, holder in self._holders.items():
            block = self._new_block(group)
            for layer, own in coded.items():
                if self._pool.group_of(layer) == group:
                    self.memory.rows(block.number, layer, shapes[layer]).copy_(own)
            holder.add(block)
        self._place()
        self._write_block(made)
        return True

    def _place(self) -> None:
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
            holder = self._holder_of(layer)
            for at in range(count - 1, -1, -1):
                if table[0, at]:
                    break
                if (block := holder.blocks[at]) is None:
                    found = addresses.zeros(shape)
                else:
                    found = addresses.address(block.number, layer, shape)
                table[:, at] = found, found + keys

    def _holder_of(self, layer: LayerKey) -> BlockHolder:
        return self._holders[self._pool.group_of(layer)]

    def _key_bytes(self, shape: Shape) -> int:
        """Return the bytes of the keys in a layer's block; values lie after them."""
        return BLOCK * shape.heads * self.form.keys.row_bytes(shape.key_size)

    def layer_tables(self, layer: LayerKey) -> tuple[int, int]:
        """Addresses of the lists of a layer's keys and of its values."""
        index = list(self._shapes).index(layer)
        first, stride = self._tables[index].ctypes.data, self._tables.strides[1]
        return first, first + stride
