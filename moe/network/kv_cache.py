"""The KV cache of each sequence, and what one packed forward pass sees of several.

Several sequences are packed into one row without padding. transformers' attention modules see a
`PackedCache`, whose ``update`` stores each sequence's new rows in its own `KVCache`. Architectures
that cannot be packed keep a cache of their own class (`TransformersCache`).
Legend: T packed tokens, L tokens of one sequence so far, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

_AHEAD = 1024  # tokens of spare room; most requests end within them and never copy their buffers


class KVCache:
    """Keys and values of one sequence: one buffer pair a layer, made when first written.

    Buffers grow with the sequence: memory follows its length, not its capacity.

    Args:
        capacity: tokens the sequence may ever have.

    Attributes:
        length: tokens whose rows are valid in every layer. A forward pass writes behind it and
            moves it when all layers are done, so a cancelled pass leaves no trace.
        room: tokens that the buffers hold, or will hold at the next `write` or `addresses`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.room = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._addresses: np.ndarray | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store ``(1, N, T, D)`` rows at positions ``length .. length + T``."""
        end = self.length + keys.shape[2]
        self.reserve(end)
        if layer not in self._layers:
            self._layers[layer] = (self._buffer(keys), self._buffer(values))
        self._grow(layer)
        for buffer, rows in zip(self._layers[layer], (keys, values), strict=True):
            buffer[:, :, self.length : end] = rows

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``(1, N, end, D)`` of keys and values."""
        keys, values = self._layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, end: int) -> None:
        """Make room for ``end`` tokens, and for some more so that buffers seldom grow."""
        if end <= self.room:
            return
        assert end <= self.capacity, f"{end} tokens in buffers of {self.capacity}"
        self.room = min(self.capacity, end + max(end // 4, _AHEAD))
        self._addresses = None

    def addresses(self, layers: int) -> np.ndarray:
        """``(layers, 2)`` int64: the addresses of each layer's keys and values, written before.

        They stay valid until `reserve` needs more room than there is.
        """
        if self._addresses is None:
            for layer in range(layers):
                self._grow(layer)
            buffers = [self._layers[layer] for layer in range(layers)]
            self._addresses = np.array([[b.data_ptr() for b in pair] for pair in buffers], np.int64)
        return self._addresses

    def fork(self, capacity: int, length: int) -> KVCache:
        """A copy that has read the first ``length`` tokens."""
        assert length <= self.length
        copy = type(self)(capacity)
        for layer in self._layers:
            copy.write(layer, *self.read(layer, length))
        copy.length = length
        return copy

    def _grow(self, layer: int) -> None:
        old = self._layers[layer]
        if old[0].shape[2] < self.room:
            self._layers[layer] = (self._buffer(old[0]), self._buffer(old[1]))
            for buffer, rows in zip(self._layers[layer], old, strict=True):
                buffer[:, :, : self.length] = rows[:, :, : self.length]

    def _buffer(self, rows: Tensor) -> Tensor:
        shape = (rows.shape[0], rows.shape[1], self.room, rows.shape[3])
        return torch.empty(shape, dtype=rows.dtype, device=rows.device)


@dataclass
class TransformersCache:
    """State of one sequence in the cache class of its architecture.

    transformers changes it in place, layer by layer: do not use it after a cancelled pass.
    """

    length: int = 0
    state: Any = None

    def fork(self, capacity: int, length: int) -> TransformersCache:
        """A copy that has read the same tokens, all of them: states cannot be cut."""
        assert length == self.length
        return TransformersCache(length, deepcopy(self.state))


SequenceCache = KVCache | TransformersCache


@dataclass
class Work:
    """New tokens of one sequence to be read in the next pass.

    Attributes:
        token_ids: at least one.
        cache: the sequence's state; its length moves when the pass is done.
        all_logits: give ``(T, V)`` logits instead of the last token's ``(1, V)``.
    """

    token_ids: Sequence[int]
    cache: SequenceCache
    all_logits: bool = False


class PackedCache(Cache):
    """The cache that transformers sees during one packed pass over several sequences.

    Most attention modules only attend to what ``update`` returns; packed attention then reads each
    sequence's buffers, and nothing is copied. Modules that compute with it first (latent attention
    expands it to heads) need the whole history, packed. `moe.network.attention` finds out at a
    layer's first pass which of the two it does.

    Attributes:
        decoding: the pass is a decode step; else it reads prompts.
        needs_history: layers that compute with what ``update`` returns before they attend.
        watched: attention layers leave in `received` how much attention each row gets.
    """

    def __init__(
        self,
        sequences: Sequence[KVCache],
        sizes: Sequence[int],
        needs_history: set[int],
        *,
        decoding: bool = False,
        watched: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.decoding = decoding
        self.watched = watched
        self.received: Tensor | None = None
        self.sequences = sequences
        self.sizes = list(sizes)
        self.needs_history = needs_history
        self.returned: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: object,
        **_kw: object,
    ) -> tuple[Tensor, Tensor]:
        """Store new rows ``(1, N, T, D)``; return them, or all history ``(1, N, sum of L, D)``."""
        keys = key_states.split(self.sizes, dim=2)
        values = value_states.split(self.sizes, dim=2)
        for sequence, k, v in zip(self.sequences, keys, values, strict=True):
            sequence.write(layer_idx, k, v)
        if layer_idx in self.needs_history:
            parts = [
                s.read(layer_idx, end) for s, end in zip(self.sequences, self.ends, strict=True)
            ]
            both = torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)
        else:
            both = key_states, value_states
        self.returned[layer_idx] = both
        return both

    @property
    def ends(self) -> list[int]:
        """Length of each sequence once this pass is done."""
        return [s.length + size for s, size in zip(self.sequences, self.sizes, strict=True)]

    def commit(self) -> None:
        """Let the sequences grow by the rows that this pass has written."""
        for sequence, end in zip(self.sequences, self.ends, strict=True):
            sequence.length = end

    def take_received(self) -> Tensor | None:
        """`received` of the last attention layer, which is then forgotten."""
        received, self.received = self.received, None
        return received

    def positions(self) -> Tensor:
        """``(T,)`` int64, of the new tokens in their sequences."""
        spans = zip(self.ends, self.sizes, strict=True)
        return torch.cat([torch.arange(end - size, end) for end, size in spans])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
