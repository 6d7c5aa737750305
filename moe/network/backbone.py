"""The transformers model without its experts: from work on sequences to lanes.

transformers' own ``forward`` runs unchanged. If a probe at load time shows that packed attention
(several sequences in one row, `moe.network.attention`) equals transformers' own, sequences share a
pass; recurrent layers and sparse attention then serve one sequence at a time
(`moe.network.per_sequence`). Otherwise (rotary tables that depend on the longest sequence of a
batch, caches of an architecture's own) each sequence is a lane of its own with transformers' own
cache; the lanes still meet at the MoE layers. Legend: T new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.errors import UnsupportedModelError
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache, SequenceCache
from moe.kv.hidden import KEPT, HiddenRows
from moe.kv.transformers_cache import TransformersCache
from moe.network.attention import PACKED, packed_pass
from moe.network.lanes import Lane
from moe.network.own_cache import CACHE_ARGUMENT, LayerStates, OwnCache
from moe.network.packed_pass import PackedCache, Work, keep_hidden_rows, put_ahead
from moe.network.per_sequence import StatefulModules, serve_packed
from moe.network.prompt_rows import POSITIONS, given
from moe.network.recurrent_kernels import use_kernels
from moe.settings.device import to_device
from routing import Phase

PromptReader = Callable[[Work], Lane[list[Tensor]]]
"""Makes a lane that reads tokens of a sequence."""
Forward = Callable[[Sequence[Work]], list[Tensor]]
"""A forward pass over some work: the logits of each piece."""

SHORT = 16
"""Most new tokens of a sequence that a decode step reads; more are read as a prompt."""


class PassReader(Protocol):
    """Reads each token of a packed pass in several ways at once.

    Attributes:
        name: of the way, for reports.
    """

    @property
    def name(self) -> str: ...

    @property
    def cache_type(self) -> type[KVCache]:
        """The class of the caches of its sequences."""

    def read(self, forward: Forward, work: Sequence[Work]) -> list[Tensor]:
        """The logits of each piece of work."""


class Backbone:
    """Runs a model whose experts have been taken over (`moe.network.seam`).

    It starts with one lane a sequence; `moe.describe.probe` and `moe.decode.enable` find out
    whether sequences can share a pass, and whether a faster decode step gives the same.

    Attributes:
        packed: several sequences share a pass.
        can_cut: a prompt may be read in several passes; some recurrent modules begin each pass over
            several tokens anew.
        recurrent_kernels: the public functions of recurrent layers, by name; empty if our kernel
            serves packed passes on a CPU in its place, else why not.
        recurrent: packed sequences have recurrent states, which `KVCache` cannot cut anywhere.
        decode_forward: reads decode work in place of transformers' forward; None: nothing does.
        prompt_forward: the same of prompts; of those with rows of their own, transformers' does.
        reader: reads packed passes in a way of its own; None: nothing does.
        cache_type: the class of the caches of packed sequences.
        blocks: keeps keys and values of packed sequences in blocks; None: in buffers.
        own_cache: what the model keeps beside keys and values by classes of its own.
        pass_cache_type: the class of the cache that transformers sees in a packed pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.device = model.device
        self._prompt_reader: PromptReader | None = None
        self._own_attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._needs_history: set[int] = set()
        self.recurrent_kernels: dict[str, str] = {}
        self.decode_forward: Forward | None = None
        self._runs_ahead: Callable[[], bool] = lambda: False
        self.prompt_forward: Forward | None = None
        self.recurrent = self._reads_whole = False
        self.reader: PassReader | None = None
        self.cache_type: type[KVCache] = KVCache
        self.blocks: BlockPool | None = None
        self.own_cache = OwnCache.of(model)
        self.pass_cache_type = self.own_cache.standing_for(PackedCache, LayerStates)
        self._final_hidden: list[Tensor] | None = None
        self._has_head = False
        self.set_packed(False)

    def keep_hidden(self, *, for_head: bool = False) -> None:
        """Let sequences keep the final hidden states of the tokens they read from now on.

        Args:
            for_head: and keys and values of the layer that reads them to draft.
        """
        self._has_head = for_head
        if self._final_hidden is None:
            caught = self._final_hidden = []
            self.model.get_decoder().register_forward_hook(
                lambda _module, _inputs, output: caught.insert(0, output[0][0])
            )

    @property
    def keeps_hidden(self) -> bool:
        """Sequences keep final hidden states."""
        return self._final_hidden is not None

    def serve_each(self, modules: StatefulModules) -> None:
        """Let these modules see one sequence at a time in packed passes from now on."""
        serve_packed(modules)
        self.own_cache = replace(
            self.own_cache, position_dims=modules.position_dims, layers=modules.own_layers
        )
        self.pass_cache_type = self.own_cache.standing_for(PackedCache, LayerStates)
        self.recurrent = bool(modules.recurrent or modules.own_layers)
        self.recurrent_kernels = use_kernels(modules.recurrent)

    def read_prompts_by(self, reader: PromptReader) -> None:
        """Let this read prompts in place of `lanes`, of a model that is not autoregressive."""
        self._prompt_reader = reader

    @property
    def can_cut(self) -> bool:
        reads_parts = self.packed or self._prompt_reader is not None
        return reads_parts and not self._reads_whole

    @property
    def history_layers(self) -> set[int]:
        """Attention layers that compute with their whole history before they attend."""
        return self._needs_history

    def read_whole(self) -> None:
        """Never read a prompt in several passes from now on."""
        self._reads_whole = True

    def set_packed(self, packed: bool) -> None:
        """Let sequences share passes from now on, or give each a lane of its own."""
        self.packed = packed
        configs = [module.config for module in self.model.modules() if hasattr(module, "config")]
        for config in {id(config): config for config in configs}.values():
            config._attn_implementation = PACKED if packed else self._own_attention

    def set_reader(self, reader: PassReader | None) -> None:
        """Read packed passes by ``reader`` from now on; None: as they are."""
        self.reader = reader
        self.cache_type = KVCache if reader is None else reader.cache_type

    def decode_by(self, forward: Forward | None, ahead: Callable[[], bool] = lambda: False) -> None:
        """Read short decode work by ``forward`` from now on; None: by transformers' forward.

        Args:
            ahead: whether it reads tokens that only the device knows (`Work.ahead`) as things are,
                and returns before the device has.
        """
        self.decode_forward, self._runs_ahead = forward, ahead

    @property
    def runs_ahead(self) -> bool:
        """Return whether decode steps can be launched behind each other before they are done."""
        return self.packed and self.reader is None and self._runs_ahead()

    def new_cache(self, capacity: int) -> SequenceCache:
        """State of a new sequence that will hold at most ``capacity`` tokens."""
        if not self.packed and self._prompt_reader is None:
            return TransformersCache()
        if self.pool is not None:
            cache: KVCache = self.pool.new_cache(capacity)
        else:
            cache = self.cache_type(capacity)
        if self.own_cache.policy is not None:
            cache.policy = self.own_cache.policy
        if self._final_hidden is not None:
            cache.hidden = HiddenRows()
        if self._has_head:
            cache.head = KVCache(capacity + KEPT)  # a draft may reach beyond the end
            cache.head.hidden = HiddenRows()
        return cache

    @property
    def pool(self) -> BlockPool | None:
        """The pool of packed sequences' blocks; None: their rows are in buffers, which forks
        copy."""
        return self.blocks if self.reader is None else None

    def reading(self, work: Sequence[Work]) -> list[Lane[list[Tensor]]]:
        """Lanes that read prompts. As `lanes`, but a `PromptReader`'s give an empty row for each
        piece of work, as it has no logits of a next token."""
        if self._prompt_reader is not None:
            return [self._prompt_reader(item) for item in work]
        return self.lanes(work)

    def lanes(self, work: Sequence[Work], phase: Phase = "prefill") -> list[Lane[list[Tensor]]]:
        """One lane for all of the work if sequences are packed, else one each; work that cannot
        share a pass (`Work.alone`) has one of its own.

        Joined in order, the results of the lanes are the float32 logits of each piece of work:
        ``(1, V)`` of the last token, or ``(T, V)`` of all (`Work.all_logits`).

        Args:
            phase: what the tokens are read for.

        Raises:
            UnsupportedModelError: the model is not autoregressive (`read_prompts_by`).
        """
        if self._prompt_reader is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is not autoregressive, so no logits of a next token "
                "exist to work with; it can generate (`moe generate`, `moe serve`)"
            )
        if not self.packed:
            return [Lane(partial(self._forward_own, item), phase) for item in work]
        lanes: list[Lane[list[Tensor]]] = []
        for alone, part in groupby(work, lambda item: item.alone):
            items = list(part)
            pieces = [[item] for item in items] if alone else [items]
            lanes += [self._lane(piece, phase) for piece in pieces]
        return lanes

    def _lane(self, work: Sequence[Work], phase: Phase) -> Lane[list[Tensor]]:
        """A lane for work that shares a pass."""
        forward: Forward = self.forward_packed
        if phase == "decode" and all(map(_is_short, work)):
            forward = partial(self.forward_packed, decoding=True)
            if self.decode_forward is not None and not any(item.alone for item in work):
                forward = self.decode_forward
        elif self._compiles_prompts and not any(item.alone for item in work):
            assert self.prompt_forward is not None
            forward = self.prompt_forward
        if self.reader is not None:
            forward = partial(self.reader.read, forward)
        return Lane(partial(forward, work), phase, pieces=len(work))

    @property
    def _compiles_prompts(self) -> bool:
        """The same for all prompts of a profile. Not while somebody observes the modules."""
        if self.prompt_forward is None or self.reader is not None:
            return False
        return self.blocks is not None and self.model.config._attn_implementation == PACKED

    def forward_packed(self, work: Sequence[Work], *, decoding: bool = False) -> list[Tensor]:
        """Logits of each piece of work, by transformers' own forward; `PackedCache` says of what
        kind."""
        sizes = [len(item.token_ids) for item in work]
        sequences = [item.cache.kv for item in work]
        cache = self.pass_cache_type(
            sequences,
            sizes,
            self._needs_history,
            decoding=decoding,
            snapshots=[item.snapshots for item in work],
        )
        positions = to_device(cache.positions()[None], self.device)
        rows = work[0].rows if len(work) == 1 else None
        cache.places_given = rows is not None and POSITIONS in rows
        with packed_pass(cache), given(rows):
            _, logits = self._forward(work, **{CACHE_ARGUMENT: cache}, position_ids=positions)
        cache.commit()
        if self._final_hidden is not None:
            keep_hidden_rows(work, self._final_hidden[0])
            self._final_hidden.clear()
        return logits

    def _forward_own(self, item: Work) -> list[Tensor]:
        assert isinstance(item.cache, TransformersCache)
        inputs: dict[str, Any] = {CACHE_ARGUMENT: item.cache.state}
        if item.cache.offset and item.rows is None:
            start = item.cache.length + item.cache.offset
            positions = torch.arange(start, start + len(item.token_ids))
            inputs["position_ids"] = to_device(positions[None], self.device)
        with given(item.rows):
            output, logits = self._forward([item], **inputs)
        item.cache.state = getattr(output, CACHE_ARGUMENT)
        item.cache.length += len(item.token_ids)
        return logits

    def _forward(self, work: Sequence[Work], **inputs: Any) -> tuple[Any, list[Tensor]]:
        """Run the model over all new tokens as one row; logits of the wanted rows only."""
        rows, start = [], 0
        for item in work:
            end = start + len(item.token_ids)
            rows.append(torch.arange(start if item.all_logits else end - 1, end))
            start = end
        keep = to_device(torch.cat(rows), self.device)
        if self._keeps_logits:
            inputs["logits_to_keep"] = keep
        tokens = [token for item in work for token in item.token_ids]
        ids = to_device(torch.tensor([tokens]), self.device)
        put_ahead(work, ids[0])
        output = self.model(input_ids=ids, use_cache=True, **inputs)
        logits = output.logits[0] if self._keeps_logits else output.logits[0, keep]
        return output, list(logits.float().split([len(kept) for kept in rows]))


def _is_short(item: Work) -> bool:
    return item.cache.length > 0 and len(item.token_ids) <= SHORT
