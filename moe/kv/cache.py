"""What a model keeps of one sequence: its keys and values, and its recurrent states.

`KVCache` is what packed passes (`moe.network.packed_pass`) and compiled decode steps write and
read, in buffers of its own; `moe.kv.blocks` keeps the same in blocks of a pool. Architectures that
cannot be packed keep a cache of their own class (`moe.kv.transformers_cache`).
Legend: T new tokens, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK
from moe.kv.hidden import KEPT, HiddenRows
from moe.kv.layout import KVFormat, LayerKey, RowLayout, Shape, States, StoredBlock
from moe.kv.visibility import RowVisibility, SeenRow, seen_keys

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SNAPSHOTS = 2
"""Most positions of a prompt whose recurrent states a sequence keeps."""
_AHEAD = 1024  # tokens of spare room; most requests end within them and never copy their buffers


class RowsPass(Protocol):
    """Keys and values of all sequences of one packed pass, on a GPU
    (`moe.kv.device_blocks.DevicePass`)."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows ``(1, N, T, D)`` of all sequences."""

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
        """``(1, T, Q, V)`` attention of ``(1, Q, T, D)`` queries; None if no kernel takes them.

        Args:
            made: ``(1, N, sum of L, D)`` keys and values that the module has made itself; None:
                those of the layer's blocks.
            first_keys: of the last queries of a sequence and its tokens, the first key that each
                query sees; None if a query does not see all from there on.
            rule: names ``first_keys``: layers with the same rule ask once.
        """


class SequenceCache:
    """The state of one sequence. What it does not say otherwise is that of a state which only its
    model can read.

    Attributes:
        length: tokens that have been read.
        offset: what the position of a token behind the prompt differs by from its index (images
            take fewer positions than tokens).
        hidden: the final hidden states of the last tokens; None: nobody reads them.
    """

    length: int
    offset: int
    hidden: HiddenRows | None = None

    @property
    def kv(self) -> KVCache:
        """Itself, as packed passes and compiled steps write it."""
        raise AssertionError(f"{type(self).__name__} is not read by packed passes")

    @property
    def reusable(self) -> bool:
        """Other sequences can go on from a part of it, so that the prefix cache keeps it."""
        return False

    @property
    def recurrent(self) -> bool:
        """It has states, so that it cannot be cut or forked anywhere."""
        return False

    @property
    def shared_tokens(self) -> int:
        """Of its tokens, those whose memory counts for another sequence that has them too, or is
        given up; bytes count as so many tokens' as they make."""
        return 0

    @property
    def dropped_tokens(self) -> int:
        """The memory that it has given up behind windows, in tokens."""
        return 0

    @property
    def state_tokens(self) -> int:
        """Tokens of keys and values that take as many bytes as one set of recurrent states."""
        return 0

    @property
    def buffer_shapes(self) -> Mapping[int, Shape]:
        """Of each layer of attention whose rows are in buffers."""
        return {}

    def layer_bytes(self, form: KVFormat | None = None) -> dict[int, int]:
        """Bytes of a token in each layer of attention whose rows are in buffers.

        Args:
            form: how rows would be stored; None: as they are.
        """
        return {}

    def keep_all(self, keeps: bool) -> None:
        """Keep what no later token of the sequence sees, as others may go on from there; or give it
        up as soon as it is not seen."""

    def prompt_read(self) -> None:
        """What it has read is its prompt: from now on tokens see what `moe.kv.visibility` says. A
        fork has yet to be told."""

    def mark(self) -> None:
        """Let `cut` come back to the present length after any number of passes."""

    def cut(self, length: int) -> None:
        """Forget all tokens after the first ``length``: `mark`, or within the last decode pass."""
        raise AssertionError("not for this state")

    def fork(self, capacity: int, length: int) -> SequenceCache:
        """A copy that has read the first ``length`` tokens."""
        raise AssertionError("not for this state")


class KVCache(SequenceCache):
    """Keys and values of one sequence: one buffer pair a layer, made when first written.

    Buffers grow with the sequence: memory follows its length, not its capacity. Recurrent layers
    have states in place of keys and values: those after the last token, after each token of a
    decode pass (so that drafts can be rejected), and snapshots at some positions of the prompt (so
    that prompts that begin alike can go on from there).

    Args:
        capacity: tokens the sequence may ever have.

    Attributes:
        length: tokens whose rows are valid in every layer. A forward pass writes behind it and
            moves it when all layers are done, so a cancelled pass leaves no trace.
        room: tokens that the buffers hold, or will hold at the next `write` or `addresses`.
        head: keys and values of the multi-token-prediction layer, a row for each token after the
            first: it has read the token, and the model's hidden state of the one before. It lacks
            rows where tokens came without hidden states: behind a known prefix, and after long
            rests. None: there is no such layer.
        form: how rows are stored.
        policy: what tokens behind the prompt attend to; None: all.
    """

    form = KVFormat()

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.policy: RowVisibility | None = None
        self._prompt: int | None = None  # tokens of the prompt, once it has been read
        self.length = self.offset = 0
        self.hidden: HiddenRows | None = None
        self.head: KVCache | None = None
        self.room = 0
        self._layers: dict[LayerKey, tuple[Tensor, Tensor]] = {}
        self._rates: dict[LayerKey, int] = {}
        self._addresses: np.ndarray | None = None
        self._listed: tuple[np.ndarray, np.ndarray] | None = None  # addresses, and what lists them
        self._states: dict[int, States] = {}
        self._snapshots: list[int] = []
        self._marked = -1

    @property
    def kv(self) -> KVCache:
        return self

    @property
    def reusable(self) -> bool:
        return True

    @property
    def held_tokens(self) -> int:
        """Its memory in tokens of keys and values, without that which counts for others; recurrent
        states count by their bytes."""
        states = len(self._states) * self.state_tokens if self._states else 0
        return self.length - self.shared_tokens + states

    @property
    def lent_tokens(self) -> int:
        """The number of `held_tokens`, of a sequence that the prefix cache keeps, that would count
        for sequences that run if the cache kept none."""
        return 0

    @property
    def sole_tokens(self) -> int:
        """Tokens whose memory no other sequence has."""
        return self.length

    @property
    def fork_tokens(self) -> int:
        """Tokens of the blocks that forks share; 0: they copy all."""
        return 0

    @property
    def counts_blocks(self) -> bool:
        """Its memory is whole blocks of a pool that has only so many."""
        return False

    @property
    def whole(self) -> bool:
        """It has the rows of all its tokens."""
        return True

    def prompt_read(self) -> None:
        self._prompt = self.length

    def seen(self, position: int) -> SeenRow | None:
        """Return what the token at a position attends to in layers that see all; None: all."""
        if self.policy is None or self._prompt is None:
            return None
        return self.policy.row(self._prompt, position)

    def whole_heads(self, layers: Sequence[LayerKey]) -> np.ndarray | None:
        """``(layers,)`` int64, for compiled decode steps: the addresses of a byte for each key head
        of these layers, 1 where the head attends to all tokens whatever `seen` says, or 0 where no
        head does; None: in no layer."""
        return None

    def seen_mask(self, layer: LayerKey, query: Tensor, keys: Tensor) -> Tensor | None:
        """``(N, L)`` bool: the keys that the last of ``(1, N, L, D)`` tokens attends to with
        ``(1, Q, 1, D)`` queries in a layer; None: what its layer's rule lets it see."""
        row = self.seen(keys.shape[2] - 1)
        if row is None:
            return None
        places = seen_keys(row, query[0, :, 0], keys[0], turned=self.form.keys.turned)
        seen = torch.zeros(keys.shape[1:3], dtype=torch.bool, device=keys.device)
        return seen.scatter_(1, places.to(keys.device), True)

    def keep(self, kept: bool) -> None:
        """Let what it shares count for it rather than for sequences that run; or no longer."""

    @property
    def state_tokens(self) -> int:
        states = next(iter(self._states.values()), {})
        return -(-sum(state.nbytes for state in states.values()) // max(self.token_bytes, 1))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        rows = [(self.rate(layer), pair) for layer, pair in self._layers.items()]
        return sum(-(-x[:, :, :1].nbytes // rate) for rate, pair in rows for x in pair)

    def layer_bytes(self, form: KVFormat | None = None) -> dict[int, int]:
        return {
            layer: sum(rows[:, :, :1].nbytes for rows in self._layers[layer])
            if form is None
            else form.token_bytes(*shape)
            for layer, shape in self.buffer_shapes.items()
        }

    @property
    def buffer_shapes(self) -> dict[int, Shape]:
        return {
            layer: Shape(keys.shape[1], keys.shape[3], values.shape[3])
            for layer, (keys, values) in self._layers.items()
            if not isinstance(layer, tuple)
        }

    @property
    def layers(self) -> list[LayerKey]:
        """The layers whose rows it keeps."""
        return list(self._layers)

    @property
    def recurrent(self) -> bool:
        return bool(self._states)

    @property
    def states(self) -> States:
        """The recurrent states after the last token; empty without recurrent layers."""
        return self._states.get(self.length, {})

    def advance(
        self, states: Mapping[int, States], tokens: int, snapshots: Sequence[int] = ()
    ) -> None:
        """The sequence has read ``tokens`` more.

        Args:
            states: by how many of them had been read, the last included; none without recurrent
                layers.
            snapshots: which of these to keep. Where there are more than `SNAPSHOTS`, the last one
                stays, and those without which the most tokens would be read again.
        """
        start = self.length
        self.length += tokens
        if not states:
            return
        assert tokens in states, (tokens, sorted(states))
        ends = {*self._snapshots, self._marked} & self._states.keys()
        kept = {end: self._states[end] for end in ends}
        self._states = kept | {start + at: own for at, own in states.items()}
        self._snapshots += [start + at for at in snapshots]
        while len(self._snapshots) > SNAPSHOTS:
            gaps = [end - begin for begin, end in pairwise([0, *self._snapshots[:-1]])]
            del self._snapshots[gaps.index(min(gaps))]

    def mark(self) -> None:
        self._marked = self.length

    def cut(self, length: int) -> None:
        assert length in self._states or not self._states, (length, sorted(self._states))
        if self.hidden is not None:
            self.hidden.drop(self.length - length)
        self.length, self._marked = length, -1

    def longest_fork(self, length: int) -> int:
        """The most tokens, at most ``length``, that `fork` can copy; 0 if there are none."""
        if self.policy is not None and self._prompt is not None:
            length = self.policy.most_forked(self._prompt, length)
        ends = [end for end in self._states if end <= length]
        return max(ends, default=0) if self._states else length

    def write(self, layer: LayerKey, keys: Tensor, values: Tensor, skip: int = 0) -> None:
        """Store ``(1, N, T, D)`` rows ``skip`` positions behind the sequence's end."""
        start = self.length + skip
        end = start + keys.shape[2]
        self.reserve(end)
        self._store(layer, keys, values, start)

    def write_entries(self, layer: LayerKey, entries: Tensor, rate: int, first: int) -> None:
        """Store ``(1, N, E, D)`` rows that stand for ``rate`` tokens each, the first of them as
        row ``first``; they have no values."""
        self._rates[layer] = rate
        self.reserve((first + entries.shape[2]) * rate)
        self._store(layer, entries, entries[..., :0], first)

    def rate(self, layer: LayerKey) -> int:
        """Tokens that a row of a layer stands for."""
        return self._rates.get(layer, 1)

    def read(self, layer: LayerKey, end: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Views ``(1, N, end - begin, D)`` of keys and values of these tokens; of entries,
        ``(1, N, end // rate, D)`` from the first one on."""
        keys, values = self._layers[layer]
        rows = end // self.rate(layer)
        return keys[:, :, begin:rows], values[:, :, begin:rows]

    def in_blocks(self, layer: LayerKey, end: int) -> BlockRows | None:
        """Return the place of the first ``end`` tokens of a layer, for compiled attention; None: in
        buffers, which `read` shows."""
        return None

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        """Return an object that writes and reads the rows of all sequences of a packed pass at
        once; None: nothing does, so that each sequence writes and reads its own.

        Args:
            sequences: of one model, this one among them.
            sizes: new tokens of each.
        """
        return None

    def reserve(self, end: int) -> None:
        """Make room for ``end`` tokens, and for some more so that buffers seldom grow."""
        if end <= self.room:
            return
        assert end <= self.capacity, f"{end} tokens in buffers of {self.capacity}"
        self.room = min(self.capacity, end + max(end // 4, _AHEAD))
        self._addresses = None

    def addresses(self, layers: Sequence[LayerKey]) -> np.ndarray:
        """``(layers, 2)`` int64: the addresses of these layers' keys and values, written before;
        the same layers each time.

        They stay valid until `reserve` needs more room than there is.
        """
        if self._addresses is None:
            for layer in layers:
                self._grow(layer)
            buffers = [self._layers[layer] for layer in layers]
            places = [[buffer.data_ptr() for buffer in pair] for pair in buffers]
            self._addresses = np.array(places, np.int64).reshape(-1, 2)
        return self._addresses

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of `tables`."""
        return self.room

    def tables(self, layers: Sequence[LayerKey]) -> np.ndarray:
        """``(layers, 2)`` int64, for compiled decode steps: where the addresses of the blocks of
        these layers' keys and values are listed; valid as long as `addresses`."""
        places = self.addresses(layers)
        if self._listed is None or self._listed[0] is not places:
            pointers = places.ctypes.data + 8 * np.arange(places.size, dtype=np.int64)
            self._listed = places, pointers.reshape(places.shape)
        return self._listed[1]

    def fork(self, capacity: int, length: int) -> KVCache:
        """A copy that has read the first ``length`` tokens; see `longest_fork`."""
        assert length <= self.length
        assert length == self.longest_fork(length)
        copy = type(self)(capacity)
        self.copy_buffers(copy, length)
        copy.length = length
        self.copy_states(copy)
        return copy

    def copy_buffers(self, copy: KVCache, length: int) -> None:
        """Give an empty copy of this sequence its buffers' rows of the first ``length`` tokens."""
        for layer in self._layers:
            keys, values = KVCache.read(self, layer, length)
            if layer in self._rates:
                copy.write_entries(layer, keys, self._rates[layer], 0)
            else:
                copy.write(layer, keys, values)

    def copy_states(self, copy: KVCache) -> None:
        """Give a copy of this sequence what it keeps beside keys and values: the policy; the
        recurrent states of its length, and those before; final hidden states; and the rows of the
        layer that drafts."""
        copy.policy = self.policy
        copy._snapshots = [end for end in self._snapshots if end <= copy.length]
        ends = {*copy._snapshots, copy.length} & self._states.keys()
        copy._states = {end: self._states[end] for end in ends}
        copy.offset = self.offset
        if self.hidden is None:
            return
        copy.hidden = self.hidden.without(self.length - copy.length)
        if self.head is not None:
            # The last row read has seen the token behind the last hidden state that is gone.
            seen = self.length - len(self.hidden) + 1
            rows = max(self.head.length - max(seen - copy.length, 0), 0)
            copy.head = self.head.fork(copy.capacity + KEPT, rows)
            copy.head.hidden = HiddenRows()

    @property
    def can_be_stored(self) -> bool:
        """Keys and values are all that it keeps of its tokens, and it has all of them."""
        return self.whole and not self._states and self.hidden is None

    def stored_block(self, at: int) -> StoredBlock:
        """The rows of block ``at``, for `append_block` of another cache of the same model and form.
        Its 64 tokens have been read. Not for sequences with recurrent states."""
        assert not self._states, "states are not stored"
        first, found = at * BLOCK, StoredBlock({}, [])
        for layer, pair in self._layers.items():
            keys, values = (rows[:, :, first : first + BLOCK] for rows in pair)
            shape = keys.shape[1], keys.shape[3], values.shape[3]
            found.layout[layer] = RowLayout(str(keys.dtype).removeprefix("torch."), *shape)
            parts = [rows.reshape(-1).view(torch.uint8).cpu() for rows in (keys, values)]
            found.rows.append(torch.cat(parts))
        return found

    def append_block(self, stored: StoredBlock, device: torch.device | None = None) -> bool:
        """Go on with 64 tokens that another sequence has had.

        Args:
            device: of this sequence's buffers; None: of the CPU.

        Returns:
            Whether this sequence has such layers, the bytes are as many as they take, and all of
            their numbers are finite.
        """
        made = self._rows_of(stored, device)
        if made is None:
            return False
        self._write_block(made)
        return True

    def _rows_of(
        self, stored: StoredBlock, device: torch.device | None
    ) -> dict[LayerKey, tuple[Tensor, Tensor]] | None:
        """Keys and values ``(1, N, 64, D)`` of a block; None if they are not like those in the
        buffers, or not finite."""
        assert self.length % BLOCK == 0, "only whole blocks are followed"
        if self.length and set(stored.layout) != set(self._layers):
            return None
        made = {}
        for (layer, layout), rows in zip(stored.layout.items(), stored.rows, strict=True):
            dtype, sizes = _DTYPES.get(layout.form), [layout.key_size, layout.value_size]
            if dtype is None or rows.numel() != BLOCK * layout.heads * sum(sizes) * dtype.itemsize:
                return None
            parts = rows.view(dtype).to(device).split([BLOCK * layout.heads * n for n in sizes])
            keys, values = (
                part.view(1, layout.heads, BLOCK, size)
                for part, size in zip(parts, sizes, strict=True)
            )
            if not (keys.isfinite().all() and values.isfinite().all()):
                return None
            made[layer] = keys, values
            for own, new in zip(self._layers.get(layer, ()), made[layer], strict=False):
                if (own.dtype, own.shape[1], own.shape[3]) != (dtype, new.shape[1], new.shape[3]):
                    return None
        return made

    def _write_block(self, rows: Mapping[LayerKey, tuple[Tensor, Tensor]]) -> None:
        for layer, pair in rows.items():
            self.write(layer, *pair)
        self.length += BLOCK

    def _store(self, layer: LayerKey, keys: Tensor, values: Tensor, start: int) -> None:
        if layer not in self._layers:
            self._layers[layer] = (self._buffer(layer, keys), self._buffer(layer, values))
        self._grow(layer)
        for buffer, rows in zip(self._layers[layer], (keys, values), strict=True):
            buffer[:, :, start : start + rows.shape[2]] = rows

    def _grow(self, layer: LayerKey) -> None:
        old = self._layers[layer]
        if old[0].shape[2] < self._room_of(layer):
            self._layers[layer] = (self._buffer(layer, old[0]), self._buffer(layer, old[1]))
            for buffer, rows in zip(self._layers[layer], old, strict=True):
                buffer[:, :, : rows.shape[2]] = rows  # with rows that this pass has written

    def _buffer(self, layer: LayerKey, rows: Tensor) -> Tensor:
        shape = (rows.shape[0], rows.shape[1], self._room_of(layer), rows.shape[3])
        return torch.empty(shape, dtype=rows.dtype, device=rows.device)

    def _room_of(self, layer: LayerKey) -> int:
        return -(-self.room // self.rate(layer))
