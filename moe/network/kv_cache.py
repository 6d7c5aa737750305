"""The KV cache of each sequence, and what one packed forward pass sees of several.

Several sequences are packed into one row without padding. transformers' attention modules see a
`PackedCache`, whose ``update`` stores each sequence's new rows in its own `KVCache`. Architectures
that cannot be packed keep a cache of their own class (`TransformersCache`).
Legend: T packed tokens, L tokens of one sequence so far, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import BLOCK, RowFormat
from moe.network.hidden import KEPT, HiddenRows

LayerKey = int | tuple[str, int]
"""An attention layer's number, or what else it keeps: of each token, ``("indexer", layer)``, or of
every few tokens (`KVCache.write_entries`)."""
StateKey = tuple[int, str, int]
"""Layer, kind ("conv", "recurrent", or what `moe.network.own_cache` keeps) and index of a recurrent
state."""
States = Mapping[StateKey, Tensor]
"""Recurrent states of one sequence after one of its tokens; never changed in place."""

SNAPSHOTS = 2
"""Most positions of a prompt whose recurrent states a sequence keeps."""
_AHEAD = 1024  # tokens of spare room; most requests end within them and never copy their buffers


class KVFormat(NamedTuple):
    """How rows of keys and of values are stored."""

    keys: RowFormat = RowFormat()
    values: RowFormat = RowFormat()

    @classmethod
    def of_bits(cls, bits: int) -> KVFormat:
        """The format of a precision; codes are those of turned rows."""
        row = RowFormat(bits, turned=bits < 16)
        return cls(row, row)

    def token_bytes(self, heads: int, key_size: int, value_size: int) -> int:
        """Bytes of a token in one layer."""
        return heads * (self.keys.row_bytes(key_size) + self.values.row_bytes(value_size))


class RowLayout(NamedTuple):
    """How a layer's rows of a `StoredBlock` lie: all keys, then all values, head by head.

    Attributes:
        form: `CODED`, or the dtype.
    """

    form: str
    heads: int
    key_size: int
    value_size: int


CODED = "coded"
"""Rows are as a sequence with blocks keeps them, in its `KVFormat`."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StoredBlock(NamedTuple):
    """What a sequence keeps of 64 tokens, as bytes: for disks and other processes
    (`moe.network.block_codec`).

    Attributes:
        rows: ``(bytes,)`` uint8 on the CPU, of each layer of the layout.
    """

    layout: dict[LayerKey, RowLayout]
    rows: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(rows.numel() for rows in self.rows)


class KVCache:
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
        hidden: the final hidden states of the last tokens; None: nobody reads them.
        offset: what the position of a token behind the prompt differs by from its index (images
            take fewer positions than tokens).
        head: keys and values of the multi-token-prediction layer, a row for each token after the
            first: it has read the token, and the model's hidden state of the one before. It lacks
            rows where tokens came without hidden states: behind a known prefix, and after long
            rests. None: there is no such layer.
        form: how rows are stored.
    """

    form = KVFormat()

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = self.offset = 0
        self.hidden: HiddenRows | None = None
        self.head: KVCache | None = None
        self.room = 0
        self._layers: dict[LayerKey, tuple[Tensor, Tensor]] = {}
        self._rates: dict[LayerKey, int] = {}
        self._addresses: np.ndarray | None = None
        self._states: dict[int, States] = {}
        self._snapshots: list[int] = []
        self._marked = -1

    @property
    def shared_tokens(self) -> int:
        """Of its tokens, those whose memory counts for another sequence that has them too, or is
        given up; bytes count as so many tokens' as they make."""
        return 0

    @property
    def held_tokens(self) -> int:
        """Its memory in tokens of keys and values, without that which counts for others; recurrent
        states count by their bytes."""
        states = len(self._states) * self.state_tokens if self._states else 0
        return self.length - self.shared_tokens + states

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

    def keep_all(self, keeps: bool) -> None:
        """Keep what no later token of the sequence sees, as others may go on from there; or give it
        up as soon as it is not seen."""

    @property
    def whole(self) -> bool:
        """It has the rows of all its tokens."""
        return True

    def keep(self, kept: bool) -> None:
        """Let what it shares count for it rather than for sequences that run; or no longer."""

    @property
    def state_tokens(self) -> int:
        """Tokens of keys and values that take as many bytes as one set of recurrent states."""
        states = next(iter(self._states.values()), {})
        return -(-sum(state.nbytes for state in states.values()) // max(self.token_bytes, 1))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        rows = [(self.rate(layer), pair) for layer, pair in self._layers.items()]
        return sum(-(-x[:, :, :1].nbytes // rate) for rate, pair in rows for x in pair)

    def saved_bytes(self, form: KVFormat) -> int:
        """How many bytes fewer a token would take if attention's rows were stored in this form."""
        saved = 0
        for layer, (keys, values) in self._layers.items():
            if not isinstance(layer, tuple):
                saved += keys[:, :, :1].nbytes + values[:, :, :1].nbytes
                saved -= form.token_bytes(keys.shape[1], keys.shape[3], values.shape[3])
        return saved

    @property
    def layers(self) -> list[LayerKey]:
        """What it keeps rows of."""
        return list(self._layers)

    @property
    def recurrent(self) -> bool:
        """It has states, so that it cannot be cut or forked anywhere."""
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
        """Let `cut` come back to the present length after any number of passes."""
        self._marked = self.length

    def cut(self, length: int) -> None:
        """Forget all tokens after the first ``length``: `mark`, or within the last decode pass."""
        assert length in self._states or not self._states, (length, sorted(self._states))
        if self.hidden is not None:
            self.hidden.drop(self.length - length)
        self.length, self._marked = length, -1

    def longest_fork(self, length: int) -> int:
        """The most tokens, at most ``length``, that `fork` can copy; 0 if there are none."""
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

    def read(self, layer: LayerKey, end: int) -> tuple[Tensor, Tensor]:
        """Views ``(1, N, end, D)`` of keys and values; of entries, ``(1, N, end // rate, D)``."""
        keys, values = self._layers[layer]
        rows = end // self.rate(layer)
        return keys[:, :, :rows], values[:, :, :rows]

    def in_blocks(self, layer: LayerKey, end: int) -> BlockRows | None:
        """Where the first ``end`` tokens of a layer lie, for compiled attention; None: in buffers,
        which `read` shows."""
        return None

    def begin_pass(self, sequences: Sequence[KVCache], sizes: Sequence[int]) -> RowsPass | None:
        """What writes and reads the rows of all sequences of a packed pass at once; None: nothing
        does, so that each sequence writes and reads its own.

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
        pointers = places.ctypes.data + 8 * np.arange(places.size, dtype=np.int64)
        return pointers.reshape(places.shape)

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
        """Give a copy of this sequence what it keeps beside keys and values: the recurrent states
        of its length, and those before; final hidden states; and the rows of the layer that
        drafts."""
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
            Whether this sequence has such layers and the bytes are as many as they take.
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
        buffers."""
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


@dataclass
class TransformersCache:
    """State of one sequence in the cache class of its architecture.

    transformers changes it in place, layer by layer: do not use it after a cancelled pass.
    """

    length: int = 0
    state: Any = None
    offset: int = 0
    shared_tokens = 0

    def mark(self) -> None:
        """Sequences with such a state are not drafted for."""

    def cut(self, length: int) -> None:
        assert length == self.length, "states cannot be cut"

    def fork(self, capacity: int, length: int) -> TransformersCache:
        """A copy that has read the same tokens, all of them: states cannot be cut."""
        assert length == self.length
        return TransformersCache(length, deepcopy(self.state), self.offset)


SequenceCache = KVCache | TransformersCache


@dataclass
class Work:
    """New tokens of one sequence to be read in the next pass.

    Attributes:
        token_ids: at least one.
        cache: the sequence's state; its length moves when the pass is done.
        all_logits: give ``(T, V)`` logits instead of the last token's ``(1, V)``.
        snapshots: after how many of the tokens the sequence keeps its recurrent states, in order.
        rows: what the text model is given in place of the tokens' embeddings
            (`moe.network.prompt_rows`); None: nothing else.
    """

    token_ids: Sequence[int]
    cache: SequenceCache
    all_logits: bool = False
    snapshots: Sequence[int] = ()
    rows: Mapping[str, Any] | None = None

    @property
    def alone(self) -> bool:
        """It cannot share a pass: its positions are not the tokens' indices, or it has rows."""
        return self.rows is not None or self.cache.offset != 0


def keep_hidden_rows(work: Sequence[Work], hidden_TH: Tensor) -> None:
    """Give each sequence its part of a pass's final hidden states, if the sequences keep them."""
    first = work[0].cache
    if not isinstance(first, KVCache) or first.hidden is None:
        return
    sizes = [len(item.token_ids) for item in work]
    for item, rows in zip(work, hidden_TH.split(sizes), strict=True):
        assert isinstance(item.cache, KVCache)
        assert item.cache.hidden is not None
        item.cache.hidden.keep(rows)


class KeyRule(Protocol):
    """Which keys a query may see (`moe.network.attention.MaskRule`)."""

    def evaluate(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """For the last queries of a sequence and all of its keys; broadcasts to both."""


class RowsPass(Protocol):
    """Keys and values of all sequences of one packed pass, on a GPU
    (`moe.network.device_blocks.DevicePass`)."""

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


def layer_of(
    rows: Mapping[LayerKey, tuple[Tensor, ...]], keys: Tensor, values: Tensor, own: int
) -> int:
    """The layer whose rows these are; a module's own number if it has computed with them. The two
    differ in modules that run several times in a pass, each time with a cache of its own."""
    for layer, pair in rows.items():
        if isinstance(layer, int) and pair[0] is keys and pair[-1] is values:
            return layer
    return own


class PackedCache(Cache):
    """The cache that transformers sees during one packed pass over several sequences.

    Most attention modules only attend to what ``update`` returns; packed attention then reads each
    sequence's buffers, and nothing is copied. Modules that compute with it first (latent attention
    expands it to heads) need the whole history, packed. `moe.network.attention` finds out at a
    layer's first pass which of the two it does.

    Attributes:
        decoding: the pass is a decode step; else it reads prompts.
        snapshots: of each sequence, see `Work`.
        needs_history: layers that compute with what ``update`` returns before they attend.
        watched: attention layers leave in `received` how much attention each row gets.
        states: of each sequence its recurrent states, by how many tokens of this pass they have
            read; `commit` gives them to the sequence.
        rows_pass: writes and reads the rows of all sequences at once; None: each has its own.
        places_given: positions come with the pass, so `positions` says nothing about them.
        adds_masks: modules that see one sequence at a time add their mask to scores, and change it.
        recurrent_before: the recurrent state that the running module asked for last, if there is
            one: kernels go on from it where their callers do not hand it on.
    """

    def __init__(
        self,
        sequences: Sequence[KVCache],
        sizes: Sequence[int],
        needs_history: set[int],
        *,
        decoding: bool = False,
        watched: bool = False,
        snapshots: Sequence[Sequence[int]] | None = None,
    ) -> None:
        # Not super(): that may be an architecture's own class, with other arguments.
        Cache.__init__(self, layers=[])
        self.decoding, self.snapshots = decoding, snapshots or [()] * len(sequences)
        self.watched = watched
        self.received: Tensor | None = None
        self.sequences = sequences
        self.sizes = list(sizes)
        self.needs_history = needs_history
        self.rows_pass = sequences[0].begin_pass(sequences, sizes) if sequences else None
        self.returned: dict[LayerKey, tuple[Tensor, ...]] = {}
        self.states: list[dict[int, dict[StateKey, Tensor]]] = [{} for _ in sequences]
        self.recurrent_before: Tensor | None = None
        self.adds_masks = False
        self.places_given = False
        self._running: list[int] = []
        self._own_layers: dict[int, tuple[Any, Any]] = {}  # of the running module
        self._token = self._size = 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: object,
        **_kw: object,
    ) -> tuple[Tensor, Tensor]:
        """Store new rows ``(1, N, T, D)``; return them, or all history ``(1, N, sum of L, D)``.

        Inside `running` rows and history are those of its one sequence.
        """
        if self._running:
            return self._extend(layer_idx, key_states, value_states)
        if self.rows_pass is not None:
            self.rows_pass.write(layer_idx, key_states, value_states)
        else:
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

    @contextmanager
    def running(self, sequences: list[int], token: int, size: int) -> Iterator[None]:
        """Let a module read and write the states and histories of these sequences only.

        Args:
            sequences: as one batch.
            token: how many tokens of each it has read in this pass before.
            size: how many it reads of each now.
        """
        self._running, self._token, self._size = sequences, token, size
        self.recurrent_before = None
        try:
            yield
            for own, layer in self._own_layers.values():
                self._take_apart(own, layer)
        finally:
            self._running = []
            self._own_layers.clear()

    @property
    def is_running(self) -> bool:
        """Inside `running`."""
        return bool(self._running)

    @property
    def running_end(self) -> int:
        """Tokens of the running sequence, those that are read now included."""
        return self.sequences[self._running[0]].length + self._token + self._size

    def mask(self, rule: KeyRule, queries: int, device: torch.device) -> Tensor:
        """``(1, 1, queries, L)`` bool: the keys that the running sequence's tokens see; or what to
        add to scores, if `adds_masks`."""
        keys = self.running_end
        seen = rule.evaluate(queries, keys, device).expand(queries, keys)[None, None]
        return torch.where(seen, 0.0, -torch.inf) if self.adds_masks else seen

    def distances(self, device: torch.device) -> Tensor:
        """``(size, L)`` int64: of each token of the running sequence from all that it has read."""
        keys = torch.arange(self.running_end, device=device)
        return keys[-self._size :, None] - keys

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store the indexer's keys ``(1, T, D)`` of a layer; return all of the sequence."""
        keys = indexer_key_states[:, None]
        return self._extend(("indexer", layer_idx), keys, keys[..., :0])[0][:, 0]

    def _extend(self, layer: LayerKey, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert len(self._running) == 1, "histories of several sequences are no batch"
        sequence = self.sequences[self._running[0]]
        sequence.write(layer, keys, values, self._token)
        return sequence.read(layer, self.running_end)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.recurrent_before = self._state((layer_idx, "recurrent", state_idx))
        return self.recurrent_before

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Keep the last columns of ``(B, C, T)``, or of token ids ``(B, T)``; return all of them
        behind the columns before."""
        before = self._state(key := (layer_idx, "conv", state_idx))
        if before is not None and before.ndim == 2:
            columns, kept = torch.cat([before, conv_states], dim=1), before.shape[-1]
        elif before is not None:
            # Channels of a token stay side by side, as kernels read and modules project them.
            columns = torch.cat([before.mT, conv_states.mT], dim=1).mT
            kept = before.shape[-1]
        else:
            kept = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            columns = pad(conv_states, (max(kept - conv_states.shape[-1], 0), 0))
        self._keep(key, columns[..., -kept:].clone(memory_format=torch.contiguous_format))
        return columns

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self._keep((layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self._running) and all(self._before(index) for index in self._running)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    def _before(self, index: int) -> States:
        """The states of a sequence before the tokens that run."""
        return self.states[index][self._token] if self._token else self.sequences[index].states

    def _state(self, key: StateKey) -> Tensor | None:
        """A copy for the layer, which may change it in place: that counts as its new state."""
        assert self._running, "a module with states was not found by `find_stateful`"
        found = [self._before(index).get(key) for index in self._running]
        states = [state for state in found if state is not None]
        if len(states) < len(found):
            return None
        copy = torch.cat(states)
        self._keep(key, copy)
        return copy

    def running_keys(self, layer: LayerKey) -> Tensor:
        """``(1, N, L, D)``: the keys of the running sequence, those of this pass included."""
        assert len(self._running) == 1, "histories of several sequences are no batch"
        return self.sequences[self._running[0]].read(layer, self.running_end)[0]

    def own_layer(self, own: Any) -> Any:
        """The running sequence's cache layer of an architecture's own class; what its module does
        to it counts when the module is done.

        Args:
            own: the `moe.network.own_cache.OwnLayer`.
        """
        assert len(self._running) == 1, "such layers are no batch"
        if own.index not in self._own_layers:
            (index,) = self._running
            self._own_layers[own.index] = own, self._made_layer(own, index)
        return self._own_layers[own.index][1]

    def _made_layer(self, own: Any, index: int) -> Any:
        sequence, length = self.sequences[index], self.running_end - self._size
        keys = map(own.rows_key, own.entries) if length else ()
        entries = {key: sequence.read(key, length)[0][:, 0] for key in keys}
        return own.made(self._before(index), entries, length)

    def _take_apart(self, own: Any, layer: Any) -> None:
        """Keep the running sequence's layer as rows and states."""
        (index,) = self._running
        for member, none in own.entries.items():
            found, first = member.get(layer), (self.running_end - self._size) // own.rate
            rows = none if found is None else found[:, first:]
            self.sequences[index].write_entries(
                own.rows_key(member), rows[:, None], own.rate, first
            )
        for key, state in own.states_of(layer).items():
            self._keep(key, state)

    def _keep(self, key: StateKey, states: Tensor) -> None:
        for index, state in zip(self._running, states.split(1), strict=True):
            self.states[index].setdefault(self._token + self._size, {})[key] = state

    def commit(self) -> None:
        """Let the sequences grow by the rows that this pass has written."""
        passed = zip(self.sequences, self.states, self.sizes, self.snapshots, strict=True)
        for sequence, states, size, snapshots in passed:
            sequence.advance(states, size, snapshots)

    def take_received(self) -> Tensor | None:
        """`received` of the last attention layer, which is then forgotten."""
        received, self.received = self.received, None
        return received

    def positions(self) -> Tensor:
        """``(T,)`` int64, of the new tokens in their sequences."""
        spans = zip(self.sequences, self.ends, self.sizes, strict=True)
        return torch.cat([torch.arange(end - size, end) + s.offset for s, end, size in spans])

    def history_positions(self) -> Tensor:
        """``(1 + P,)`` int64, of the P tokens that all sequences have read before, in order. A zero
        stands ahead, so that tables of these and of the T new tokens never have T rows."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), *map(torch.arange, self._begins)])

    @property
    def table_rows(self) -> int:
        """Rows of a table of all tokens: see `history_positions`, and the new ones behind them."""
        return 1 + sum(self._begins) + sum(self.sizes)

    def running_table(self, table: Tensor) -> Tensor:
        """``(1, L, ...)``: the running sequence's rows of a ``(1, table_rows, ...)`` table."""
        (index,) = self._running
        first = 1 + sum(self._begins[:index])
        new = 1 + sum(self._begins) + sum(self.sizes[:index])
        before = table[:, first : first + self._begins[index]]
        return torch.cat([before, table[:, new : new + self._token + self._size]], 1)

    @property
    def _begins(self) -> list[int]:
        return [sequence.length for sequence in self.sequences]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.running_end - self._size if self._running else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (self.running_end if self._running else query_length), 0
