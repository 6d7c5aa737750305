"""Blocks of keys and values in main memory.

The rows of all layers of a block are one piece of pages, which the system gets back at once when
nobody has them: an allocator would keep them as holes between others.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.kv import BLOCK, NativeKV
from moe.kv.blocks import BlockKVCache
from moe.kv.cache import KVCache
from moe.kv.layout import CODED, KVFormat, LayerKey, Shape
from moe.kv.visibility import HeadsOfLayers


class BlockPages(NamedTuple):
    """Memory of some layers of a block.

    Attributes:
        shapes: of these layers, in the order of their rows.
        begins: where each layer's rows begin in it.
        address: of the first byte.
    """

    shapes: tuple[tuple[LayerKey, Shape], ...]
    begins: Mapping[LayerKey, int]
    pages: mmap.mmap
    memory: Tensor
    address: int


class HostBlocks:
    """See `BlockMemory`.

    Args:
        kernel: writes and reads rows.
    """

    row_form = CODED
    counts_blocks = False

    def __init__(self, kernel: NativeKV, form: KVFormat) -> None:
        self.kernel, self.form = kernel, form
        self._zeros: dict[int, Tensor] = {}
        self._numbers = itertools.count(1)
        self._pieces: dict[int, list[BlockPages]] = {}

    def take(self, shapes: Mapping[LayerKey, Shape]) -> int:
        number = next(self._numbers)
        self._pieces[number] = [self.new_piece(shapes)] if shapes else []
        return number

    def give_back(self, number: int) -> None:
        del self._pieces[number]

    def give_part_back(self, number: int, heads: HeadsOfLayers) -> None:
        """See `BlockMemory`: whole pages with no other rows go back to the system."""
        for piece in self._pieces.get(number, ()):
            for begin, size in _pages_of_heads(self.form, piece.shapes, heads):
                piece.pages.madvise(mmap.MADV_DONTNEED, begin, size)

    def new_piece(self, shapes: Mapping[LayerKey, Shape]) -> BlockPages:
        """Memory of these layers' rows."""
        layers = tuple(shapes.items())
        begins, size = _places(self.form, layers)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        return BlockPages(layers, begins, pages, memory, memory.data_ptr())

    @property
    def addresses(self) -> HostBlocks:
        return self

    def rows(self, number: int, layer: LayerKey, shape: Shape) -> Tensor:
        piece, begin = self._find(number, layer, shape)
        return piece.memory[begin : begin + BLOCK * self.form.token_bytes(*shape)]

    def address(self, number: int, layer: LayerKey, shape: Shape) -> int:
        """See `BlockAddresses`."""
        piece, begin = self._find(number, layer, shape)
        return piece.address + begin

    def _find(self, number: int, layer: LayerKey, shape: Shape) -> tuple[BlockPages, int]:
        pieces = self._pieces[number]
        for piece in pieces:
            if layer in piece.begins:
                return piece, piece.begins[layer]
        pieces.append(self.new_piece({layer: shape}))
        return pieces[-1], 0

    def zeros(self, shape: Shape) -> int:
        """See `BlockAddresses`."""
        size = BLOCK * self.form.token_bytes(*shape)
        if size not in self._zeros:
            self._zeros[size] = torch.zeros(size, dtype=torch.uint8)
        return self._zeros[size].data_ptr()

    def are_finite(self, rows: Tensor, shape: Shape) -> bool:
        """See `BlockMemory`."""
        heads, *sizes = shape
        keys_bytes = BLOCK * heads * self.form.keys.row_bytes(shape.key_size)
        tables = np.array([rows.data_ptr(), rows.data_ptr() + keys_bytes])
        return all(
            bool(self.kernel.read(table, heads, size, BLOCK, form).isfinite().all())
            for table, size, form in zip(
                (tables.ctypes.data, tables.ctypes.data + 8), sizes, self.form[:2], strict=True
            )
        )

    def write(
        self, cache: BlockKVCache, layer: LayerKey, keys: Tensor, values: Tensor, start: int
    ) -> None:
        first, second = cache.layer_tables(layer)
        bounds = self.form.bounds_begin(*cache.shapes[layer])
        self.kernel.write(keys[0], first, start, self.form.keys, bounds)
        self.kernel.write(values[0], second, start, self.form.values)

    def read(
        self, cache: BlockKVCache, layer: LayerKey, end: int, begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        heads, *sizes = cache.shapes[layer]
        keys, values = (
            self.kernel.read(table, heads, size, end, form, begin)[None]
            for table, size, form in zip(
                cache.layer_tables(layer), sizes, self.form[:2], strict=True
            )
        )
        return keys, values

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> None:
        """Compiled code takes one sequence at a time."""


@lru_cache
def _places(
    form: KVFormat, shapes: tuple[tuple[LayerKey, Shape], ...]
) -> tuple[dict[LayerKey, int], int]:
    """Return the begin of each layer's rows in a piece, and its bytes."""
    begins, end = {}, 0
    for layer, shape in shapes:
        begins[layer] = end
        end += BLOCK * form.token_bytes(*shape)
    return begins, end


def kept_share(form: KVFormat, shapes: Mapping[int, Shape], heads: HeadsOfLayers) -> float:
    """Return the share of the bytes of these layers' rows of a block that stays when the heads'
    pages go back to the system. Rows of a head that fill no page, or a part of one, stay."""
    layers = tuple(shapes.items())
    _, size = _places(form, layers)
    return 1 - sum(length for _, length in _pages_of_heads(form, layers, heads)) / size


@lru_cache
def _pages_of_heads(
    form: KVFormat, shapes: tuple[tuple[LayerKey, Shape], ...], heads: HeadsOfLayers
) -> list[tuple[int, int]]:
    """First byte and bytes of the pages of a piece that have rows of these heads only."""
    (begins, size), known = _places(form, shapes), dict(shapes)
    spans: list[list[int]] = []
    for layer, own in sorted(heads, key=lambda each: begins.get(each[0], 0)):
        if layer not in known:
            continue
        count, *sizes = known[layer]
        begin = begins[layer]
        for row, numbers in zip(form[:2], sizes, strict=True):
            rows = BLOCK * row.row_bytes(numbers)
            for head in sorted(own):
                first = begin + head * rows
                if spans and spans[-1][1] == first:
                    spans[-1][1] += rows
                else:
                    spans.append([first, first + rows])
            begin += count * rows
    page, found = mmap.PAGESIZE, []
    for first, end in spans:
        begin, stop = -(-first // page) * page, end if end == size else end // page * page
        if begin < stop:
            found.append((begin, stop - begin))
    return found
