"""One forward pass over new tokens of several sequences, packed into one row without padding.

`Work` is what a pass reads of a sequence. transformers' modules see a `PackedCache`: ``update``
stores each sequence's new rows behind the end of its own `KVCache`, and `PackedCache.commit` moves
the ends when the pass is done, so a cancelled pass leaves no trace.
Legend: T packed tokens, L tokens of one sequence so far, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from moe.kv.cache import KVCache, SequenceCache
from moe.kv.layout import LayerKey, StateKey, States


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
        ahead: ``(1,)`` int64 on the model's device: the last token, where the host does not know it
            yet; `token_ids` has any number in its place.
        lent: its logits are read before the next pass, which may overwrite them.
    """

    token_ids: Sequence[int]
    cache: SequenceCache
    all_logits: bool = False
    snapshots: Sequence[int] = ()
    rows: Mapping[str, Any] | None = None
    ahead: Tensor | None = None
    lent: bool = False

    @property
    def alone(self) -> bool:
        """It cannot share a pass: its positions are not the tokens' indices, or it has rows."""
        return self.rows is not None or self.cache.offset != 0


def put_ahead(work: Sequence[Work], ids_T: Tensor) -> None:
    """Put tokens that only the device knows (`Work.ahead`) among those of a pass."""
    ahead = [item.ahead for item in work if item.ahead is not None]
    if ahead and len(ahead) == sum(len(item.token_ids) for item in work):
        torch.cat(ahead, out=ids_T[: len(ahead)])
        return
    end = 0
    for item in work:
        end += len(item.token_ids)
        if item.ahead is not None:
            ids_T[end - 1 : end] = item.ahead


def keep_hidden_rows(work: Sequence[Work], hidden_TH: Tensor) -> None:
    """Give each sequence its part of a pass's final hidden states, if the sequences keep them."""
    first = work[0].cache
    if first.hidden is None:
        return
    start = 0
    for item in work:
        assert item.cache.hidden is not None
        end = start + len(item.token_ids)
        item.cache.hidden.keep(hidden_TH, start, end)
        start = end


class KeyRule(Protocol):
    """Which keys a query may see (`moe.network.attention.MaskRule`)."""

    def evaluate(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The rule for the last queries of a sequence and all of its keys; broadcasts to both."""


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
        snapshots: Sequence[Sequence[int]] | None = None,
    ) -> None:
        # Not super(): that may be an architecture's own class, with other arguments.
        Cache.__init__(self, layers=[])
        self.decoding, self.snapshots = decoding, snapshots or [()] * len(sequences)
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
