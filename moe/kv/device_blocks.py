"""Keys and values in blocks on a GPU: one pool that is never reallocated, and block tables.

`DeviceBlocks` is the memory of a `BlockPool` there. Of each layer it has one tensor with the rows
of all blocks, made when the layer is first written, which probes do while a model is loaded. A
sequence lists its blocks by number, the same ones in all layers; forks and cached prefixes list the
same blocks. `DevicePass` is what one packed pass of prompts reads and writes, with one launch a
layer for each; recorded decode steps (`moe.decode.cuda_graph`) read the same tables.
Legend: P blocks, Q query heads, N key/value heads, D key size, V value size, T new tokens of all
sequences, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.triton import attention, rows
from kernels.triton.attention import BLOCK, KeyRows
from moe.kv.blocks import BlockKVCache
from moe.kv.cache import KVCache
from moe.kv.layout import KVFormat, LayerKey, Shape
from moe.kv.visibility import HeadsOfLayers
from moe.settings.device import to_device

WIDEST = 256
"""Numbers of the widest head that the kernel for prompts takes."""


class DeviceBlocks:
    """The memory of a pool of blocks; see `moe.kv.blocks.BlockMemory`.

    A block has rows of all layers, so that one table serves them. Layers with a window keep what is
    behind it, as the pool has no windows here.

    Args:
        dtype: of keys and values.
        count: P.
    """

    counts_blocks, addresses = True, None

    def __init__(self, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self.device, self.dtype, self.count = device, dtype, count
        self.form = KVFormat.of_bits(dtype.itemsize * 8)
        self.row_form = str(dtype).removeprefix("torch.")
        self._free = list(range(count - 1, -1, -1))
        self._layers: dict[LayerKey, tuple[Shape, Tensor]] = {}

    def take(self, shapes: Mapping[LayerKey, Shape]) -> int:
        if not self._free:
            raise MemoryError(
                f"all {self.count} blocks of keys and values on {self.device} are in use"
            )
        return self._free.pop()

    def give_part_back(self, number: int, heads: HeadsOfLayers) -> None:
        """Blocks are whole here, and policies are refused."""

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        return self._rows(layer, shape)[number].view(torch.uint8)

    def are_finite(self, rows: Tensor, shape: Shape) -> bool:
        """See `BlockMemory`."""
        return bool(rows.view(self.dtype).isfinite().all())

    def layer_rows(self, layer: LayerKey, shape: Shape) -> KeyRows:
        """A layer's keys (P, N, 64, D) and values (P, N, 64, V)."""
        heads, *sizes = shape
        both = self._rows(layer, shape).split([heads * BLOCK * size for size in sizes], 1)
        keys, values = (
            part.unflatten(1, (heads, BLOCK, size)) for part, size in zip(both, sizes, strict=True)
        )
        return KeyRows(keys, values)

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        positions = np.arange(start, start + keys.shape[2])
        slots = to_device(slots_of(cache, positions), self.device)
        shape = Shape(keys.shape[1], keys.shape[3], values.shape[3])
        self.store(layer, shape, keys, values, slots)

    def store(
        self, layer: LayerKey, shape: Shape, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Write rows ``(1, N, T, D)`` and ``(1, N, T, V)`` to ``(T,)`` slots."""
        to = self.layer_rows(layer, shape)
        assert to.values is not None
        key, value = (_side_by_side(part[0].transpose(0, 1)) for part in (keys, values))
        rows.store(key, value, to.keys, to.values, slots)

    def read(
        self, cache: BlockKVCache, layer: LayerKey, end: int, begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        numbers = to_device(cache.block_numbers[: -(-end // BLOCK)].astype(np.int64), self.device)
        found = self.layer_rows(layer, cache.shapes[layer])
        assert found.values is not None
        keys, values = (
            part[numbers].transpose(0, 1).flatten(1, 2)[None, :, begin:end]
            for part in (found.keys, found.values)
        )
        return keys, values

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> DevicePass | None:
        own = [s for s in sequences if isinstance(s, BlockKVCache) and s.memory is self]
        return DevicePass(self, own, sizes) if len(own) == len(sequences) else None

    def _rows(self, layer: LayerKey, shape: Shape) -> Tensor:
        """``(P, numbers of a block)``"""
        known, found = self._layers.get(layer, (shape, None))
        assert known == shape, (layer, known, shape)
        if found is None:
            numbers = BLOCK * shape.heads * (shape.key_size + shape.value_size)
            found = torch.empty(self.count, numbers, dtype=self.dtype, device=self.device)
            self._layers[layer] = shape, found
        return found


class DevicePass:
    """The rows of all sequences of one packed pass; see `moe.kv.cache.RowsPass`.

    Args:
        sequences: in the order of the packed row.
        sizes: new tokens of each.

    Attributes:
        positions: ``(T,)`` int64 of the new tokens, on the host.
        slots: ``(T,)`` int64: where the new tokens' rows go, see `slots_of`.
        tables: ``(S, most blocks)`` int32: the blocks of each sequence.
    """

    def __init__(
        self, memory: DeviceBlocks, sequences: Sequence[BlockKVCache], sizes: Sequence[int]
    ) -> None:
        self._memory, self._sequences = memory, sequences
        self._sizes, self._ends = list(sizes), []
        found, positions = [], []
        for sequence, size in zip(sequences, sizes, strict=True):
            end = sequence.length + size
            sequence.reserve(end)
            positions.append(np.arange(sequence.length, end))
            found.append(slots_of(sequence, positions[-1]))
            self._ends.append(end)
        self.positions = np.concatenate(positions)
        self.slots = to_device(np.concatenate(found), memory.device)
        self.tables = to_device(
            tables_of([sequence.block_numbers for sequence in sequences]), memory.device
        )
        self._spans: dict[tuple[int, bool], Tensor] = {}
        self._firsts: dict[object, Tensor | None] = {}
        self._history: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        shape = Shape(keys.shape[1], keys.shape[3], values.shape[3])
        self.give_shape(layer, shape)
        self._memory.store(layer, shape, keys, values, self.slots)

    def give_shape(self, layer: LayerKey, shape: Shape) -> None:
        """Rows of a layer are about to be written."""
        for sequence in self._sequences:
            sequence.give_shape(layer, shape)

    def attend(
        self,
        query: Tensor,
        layer: int,
        made: tuple[Tensor, Tensor] | None,
        first_keys: Callable[[int, int], Tensor | None],
        rule: object,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        if made is None:
            found = self._memory.layer_rows(layer, self._sequences[0].shapes[layer])
            found = found._replace(tables=self.tables)
        else:
            key, value = (_side_by_side(part[0]) for part in made)
            found = KeyRows(key, value)
        assert found.values is not None
        size = query.shape[-1]
        if max(size, found.values.shape[-1]) > WIDEST or (sinks is not None and sinks.ndim != 1):
            return None
        firsts = self._first_keys(first_keys, rule)
        if firsts is None:
            return None
        rows_TQD = _side_by_side(query[0].transpose(0, 1)).to(found.keys.dtype)
        return self.attend_rows(
            rows_TQD, found, firsts, scale=size**-0.5 if scale is None else scale, softcap=softcap,
            sinks=None if sinks is None else sinks.detach().float(), dtype=query.dtype,
        )[None]  # fmt: skip

    def attend_rows(self, query: Tensor, rows: KeyRows, firsts: Tensor, **how: Any) -> Tensor:
        """``(T, Q, V)`` attention of ``(T, Q, D)`` queries.

        Args:
            rows: in blocks, by `tables`; else of all tokens of the sequences, in their order.
            firsts: ``(T,)`` int32, the first key that each query sees.
            how: of `kernels.triton.attention.attend`.
        """
        values = rows.keys if rows.values is None else rows.values
        group, sizes = query.shape[1] // rows.keys.shape[-3], (query.shape[-1], values.shape[-1])
        most = attention.prompt_queries(group, *sizes, query.dtype)
        return attention.attend(
            query, rows, self._spans_of(most, rows.tables is not None), firsts,
            most_queries=most, most_keys=max(self._ends), **how,
        )  # fmt: skip

    def history(self, rows: Tensor) -> Tensor:
        """``(sum of tokens, D)``: the rows of all tokens of the sequences, new ones included, in
        their order, of a layer's ``(P, 1, 64, D)``."""
        if self._history is None:
            pairs = zip(self._sequences, self._ends, strict=True)
            slots = np.concatenate([slots_of(own, np.arange(end)) for own, end in pairs])
            both = np.stack([slots // BLOCK, slots % BLOCK])
            self._history = to_device(both, self._memory.device)
        blocks, within = self._history
        return rows[:, 0][blocks, within]

    def _first_keys(
        self, first_keys: Callable[[int, int], Tensor | None], rule: object
    ) -> Tensor | None:
        if rule not in self._firsts:
            found = [first_keys(*pair) for pair in zip(self._sizes, self._ends, strict=True)]
            known = [own for own in found if own is not None]
            whole = torch.cat(known).int() if len(known) == len(found) else None
            self._firsts[rule] = whole
        return self._firsts[rule]

    def _spans_of(self, most: int, in_blocks: bool) -> Tensor:
        key = most, in_blocks
        if key not in self._spans:
            spans, query, begin = [], 0, 0
            for index, (size, end) in enumerate(zip(self._sizes, self._ends, strict=True)):
                place = index if in_blocks else begin
                for at in range(0, size, most):
                    spans.append((place, query + at, min(most, size - at), end - size + at))
                query, begin = query + size, begin + end
            self._spans[key] = to_device(np.array(spans, np.int32), self._memory.device)
        return self._spans[key]


def slots_of(cache: BlockKVCache, positions: np.ndarray) -> np.ndarray:
    """``(T,)`` int64: of tokens at these positions, the block times 64, plus the place there."""
    numbers = cache.block_numbers[positions // BLOCK].astype(np.int64)
    return numbers * BLOCK + positions % BLOCK


def tables_of(found: Sequence[np.ndarray]) -> np.ndarray:
    """``(rows, most blocks)`` int32: each row's block numbers, zeros behind them."""
    tables = np.zeros((len(found), max(map(len, found), default=0)), np.int32)
    for row, numbers in zip(tables, found, strict=True):
        row[: len(numbers)] = numbers
    return tables


def _side_by_side(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()
