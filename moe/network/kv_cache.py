"""Keys and values of sequences, and the view of them that one packed forward pass writes through.

Several sequences are packed into one row without padding. transformers' attention modules see a
cache object (`PackedCache`) whose ``update`` stores each sequence's new rows in its own buffers.
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

_AHEAD = 1024  # tokens; most requests end within them, and never copy their buffers


class KVCache:
    """Keys and values of one sequence: one buffer pair a layer, made when first written.

    Buffers grow with the sequence, so one that may become long takes no memory before it is.

    Args:
        capacity: tokens the sequence may ever have.

    Attributes:
        length: tokens whose rows are valid in every layer. A forward pass writes behind it, and
            whoever ran the pass moves it, so a cancelled pass leaves no trace.
        room: tokens that buffers hold, or will once their layer is written or `addresses` asked.
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
        """Let buffers have room for so many tokens, and for some more so that this is rare."""
        if end <= self.room:
            return
        assert end <= self.capacity, f"{end} tokens in buffers of {self.capacity}"
        self.room = min(self.capacity, end + max(end // 4, _AHEAD))
        self._addresses = None

    def addresses(self, layers: int) -> np.ndarray:
        """``(layers, 2)`` int64: where keys and values of each layer begin, all written before.

        The buffers stay there until `reserve` needs more room than there is.
        """
        if self._addresses is None:
            for layer in range(layers):
                self._grow(layer)
            buffers = [self._layers[layer] for layer in range(layers)]
            self._addresses = np.array([[b.data_ptr() for b in pair] for pair in buffers], np.int64)
        return self._addresses

    def fork(self, capacity: int, length: int) -> KVCache:
        """A sequence of its own that has read the first ``length`` tokens of this one."""
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
    """State of one sequence in whatever cache class its architecture makes for itself.

    transformers changes it in place, layer by layer: after a cancelled pass it is not to be used.
    """

    length: int = 0
    state: Any = None

    def fork(self, capacity: int, length: int) -> TransformersCache:
        """A sequence of its own that has read the same tokens; only all of them can be taken."""
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

    Most attention modules use what ``update`` returns only as the keys and values to attend to; the
    packed attention function then reads each sequence's buffers and nothing is copied. Modules that
    compute with it first (latent attention expands it to heads) need the whole history, packed.
    Which of the two a layer does is noticed at its first pass: see `moe.network.attention`.

    Attributes:
        decoding: the new tokens are few, behind others of their sequence; else they are prompts.
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
        """Make the rows that this pass wrote part of each sequence."""
        for sequence, end in zip(self.sequences, self.ends, strict=True):
            sequence.length = end

    def take_received(self) -> Tensor | None:
        """What the last attention layer has left in `received`, once."""
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
