"""Records one decode token of transformers' own forward as operations on buffers.

`trace` reads a few tokens of a random sequence, and then one more while a recorder sees every aten
operation (`moe.decode.recorder`). Projections, attention, indexers and experts are recorded as one
operation each, without what they do inside; nor is what a layer does with its whole history before
it attends (`moe.decode.history`). `moe.decode.program` turns the operations into a program for the
compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from experts.linear import QuantizedLinear
from kernels.cpu.program import Space
from moe.decode.history import (
    HistoryTooShort,
    Latents,
    Lineage,
    biases_of,
    heads_by_key,
    latents_of,
    lengths,
    positions_chosen,
)
from moe.decode.recorder import DecodeTrace, ListsRead, ReadList, Recorder, Value
from moe.describe.attention import describe_view
from moe.describe.description import NotDescribed, Projection, RotaryTable, View
from moe.describe.observe import AttentionCall
from moe.describe.parts import close, describe_projection, same
from moe.describe.probe import random_prompts, stand_in
from moe.describe.row_wise import as_torch_does
from moe.kv.cache import KVCache
from moe.kv.layout import LayerKey, StateKey, States
from moe.network.attention import (
    MaskRule,
    is_within_tokens,
    packed_attention,
    packed_mask,
    packed_pass,
)
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.miniature import owns_stack
from moe.network.own_cache import CACHE_ARGUMENT, LayerStates, OwnLayer
from moe.network.packed_pass import KeyRule, PackedCache, Work, layer_of
from moe.network.per_sequence import depends_on_length
from moe.network.seam import experts_modules

TRACED = "moe_traced"
"""Name of the recording attention in transformers' registries."""

_PROMPT, _TOKENS = 5, 2  # read before the recorded token: a prompt, and decoded tokens


class Attends(NamedTuple):
    """The argument of an ``attention`` operation beside queries and the rows that it caches. It may
    have the positions of its keys ``(K,)``, biases ``(heads, E)`` of its scores by the distance of
    a key, and ``(heads,)`` sinks of the token: ``chosen``, ``bias`` and ``sinks``.

    Attributes:
        layer: index of its cache.
        latents: the rows are ``(1, 1, 1, R)`` latents and ``(1, 1, 1, T)`` rotated keys; None: they
            are keys and values.
        pool: of the indexer that chose the keys.
        entries: a cache of entries, which are keys and values too, and how many tokens each stands
            for. The operation has the token's own, ``entry`` ``(1, 1, D)``, and ``chosen`` are
            positions of entries. None: there are none.
    """

    layer: int
    view: View
    latents: Latents | None
    pool: int = 1
    entries: tuple[LayerKey, int] | None = None


@torch.inference_mode()
def trace(backbone: Backbone, known: Collection[str]) -> DecodeTrace:
    """Record a decode token.

    Args:
        known: names of operations to record; others are recorded as what they consist of.

    Raises:
        NotDescribed: something in the forward cannot be recorded; the message says what.
    """
    for tokens in lengths():
        try:
            return _trace(backbone, known, tokens)
        except HistoryTooShort as error:
            why = error
    raise NotDescribed(f"histories of {tokens} tokens are too short: {why}")


def _trace(backbone: Backbone, known: Collection[str], tokens: int) -> DecodeTrace:
    """
    Args:
        tokens: that the sequence has before, at least.
    """
    own_layers = backbone.own_cache.layers.values()
    every = lcm(*(own.rate for own in own_layers))  # the token ends the windows of all entries
    least = max(tokens, _PROMPT + _TOKENS) + 1
    sequence, token = _sequence(backbone, -(-least // every) * every - 1 if every > 1 else tokens)
    recorder = Recorder(known)
    ids = torch.tensor([[token]], device=backbone.device)
    positions = torch.tensor([[sequence.length]], device=backbone.device)
    cache_class = backbone.own_cache.standing_for(_TracedCache, LayerStates)
    cache = cache_class(recorder, sequence, backbone.history_layers, positions)
    recorder.give(ids, Space.TOKEN)
    recorder.give(positions, Space.POSITION)
    with ExitStack() as stack:
        for module, forward in _recorded_forwards(backbone, recorder):
            stack.enter_context(_replaced(module, forward))
        stack.enter_context(_recording(backbone, recorder, cache))
        final = list[Tensor]()
        hook = backbone.model.get_decoder().register_forward_hook(
            lambda _module, _inputs, output: final.append(output[0])
        )
        stack.callback(hook.remove)
        output = backbone.model(
            input_ids=ids, position_ids=positions, **{CACHE_ARGUMENT: cache}, use_cache=True
        )
        logits = recorder.value(output.logits[0, -1].float())
        hidden = recorder.value(final[-1][0, -1].float()) if final else None
        states = cache.states[0].get(1, {})
        for own in own_layers:
            states |= cache.states_after(own)
    done = recorder.trace
    if not isinstance(logits, Value):
        raise NotDescribed("logits do not depend on the token")
    done.logits = logits
    done.hidden = hidden if isinstance(hidden, Value) else None
    for key, state in states.items():
        value = recorder.value(state)
        assert isinstance(value, Value)
        done.after[key] = value
    if any(not state.is_floating_point() for state in states.values()):
        done.initial.update(_initial(backbone))
    return done


def _initial(backbone: Backbone) -> Iterator[tuple[StateKey, int]]:
    """Yield what states of integers are filled with before a sequence's first token: what is left
    of that behind it."""
    cache = backbone.new_cache(1)
    run_lanes(backbone.lanes([Work(random_prompts(backbone, (1,))[0], cache)]), stand_in)
    assert isinstance(cache, KVCache)
    for key, state in cache.states.items():
        if not state.is_floating_point() and state.numel() > 1:
            yield key, int(state.flatten()[0])


def _sequence(backbone: Backbone, length: int) -> tuple[KVCache, int]:
    """A random sequence of at least this length, and its next token."""
    tokens = random_prompts(backbone, (_PROMPT + _TOKENS + 1,))[0]
    cache = backbone.new_cache(max(len(tokens), length + 1)).kv
    parts = [tokens[:_PROMPT], *([token] for token in tokens[_PROMPT:-1])]
    for index, part in enumerate(parts):
        run_lanes(backbone.lanes([Work(part, cache)], "decode" if index else "prefill"), stand_in)
    _lengthen(cache, length)
    return cache, tokens[-1]


def _lengthen(cache: KVCache, length: int) -> None:
    """Give the sequence made-up rows of further tokens, like those that it has."""
    more = length - cache.length
    if more <= 0:
        return
    generator = torch.Generator().manual_seed(length)

    def like(rows: Tensor, count: int) -> Tensor:
        if rows.shape[2] == 0:  # no entry so far
            return torch.randn((*rows.shape[:2], count, rows.shape[3]), generator=generator)
        chosen = rows[:, :, torch.randint(rows.shape[2], (count,), generator=generator)]
        noise = torch.randn(chosen.shape, generator=generator).to(chosen)
        return chosen + noise * (rows.abs().mean() if rows.numel() else 0.0)

    for layer in cache.layers:
        keys, values = cache.read(layer, cache.length)
        if (rate := cache.rate(layer)) > 1:
            first = keys.shape[2]
            cache.write_entries(layer, like(keys, length // rate - first), rate, first)
        else:
            made = like(keys, more)
            cache.write(layer, made, made if same(keys, values) else like(values, more))
    cache.advance({more: cache.states} if cache.states else {}, more)


class _TracedCache(PackedCache):
    """A pass's cache that knows which tensors are states, positions, keys and values."""

    def __init__(
        self,
        recorder: Recorder,
        sequence: KVCache,
        needs_history: set[int],
        positions: Tensor,
    ) -> None:
        PackedCache.__init__(self, [sequence], [1], needs_history, decoding=True)
        self._recorder, self._positions = recorder, positions
        self._done: dict[int, Any] = {}
        self._copies = {key: state.clone() for key, state in sequence.states.items()}
        for key, state in self._copies.items():
            recorder._new(state)
            value = recorder.value(state)
            assert isinstance(value, Value)
            recorder.trace.before[key] = value

    def _before(self, index: int) -> States:
        return self._copies

    def _made_layer(self, own: OwnLayer, index: int) -> Any:
        """The layer at a token that ends a window, so that all tensors in it have fixed shapes."""
        with self._recorder.pause():
            layer = super()._made_layer(own, index)
        for member in own.entries:
            key, rows = own.rows_key(member), member.get(layer)
            self._recorder.rates[key] = own.rate
            self._recorder.histories.add([rows], Lineage((key,)))
        for member in own.counts:
            member.set(layer, self._positions[0, 0].div(own.rate, rounding_mode="floor"))
        return layer

    def _take_apart(self, own: OwnLayer, layer: Any) -> None:
        self._done[own.index] = layer

    def states_after(self, own: OwnLayer) -> dict[StateKey, Tensor]:
        """Return a layer's states after a token at any position: it adds its row to the rows of its
        window, or ends the window."""
        rate, at, layer = own.rate, self._positions[0, 0], self._done[own.index]
        left = at.remainder(rate)
        ends = left == rate - 1
        made = dict[StateKey, Tensor]()
        for member in own.windows:
            before = self._copies[key := own.state_key(member)]
            row = self._row_behind(before)
            place = left.reshape(1, 1, 1).expand_as(row)
            made[key] = torch.where(ends, 0.0, before.scatter(1, place, row))
        for member in own.lasts:
            key = own.state_key(member)
            made[key] = torch.where(ends, member.get(layer), self._copies[key])
        return made

    def _row_behind(self, window: Tensor) -> Tensor:
        """The row ``(1, 1, W)`` that has been joined to a window's rows."""
        shape = 1, 1, window.shape[2]
        for rows, *behind in self._recorder.joined:
            if rows.data_ptr() == window.data_ptr() and [x.shape for x in behind] == [shape]:
                return behind[0]
        raise NotDescribed("a cache layer of the architecture's own gets no row of the token")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **_kw: object
    ) -> tuple[Tensor, Tensor]:
        if self._recorder.paused:
            return super().update(key_states, value_states, layer_idx)
        with self._recorder.pause():
            history = super().update(key_states, value_states, layer_idx)
        self._recorder.cached[layer_idx] = key_states, value_states
        if self.is_running or layer_idx in self.needs_history:
            self._add_history(layer_idx, history)
        return history

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        if self._recorder.paused:
            return super().update_indexer(indexer_key_states, layer_idx)
        with self._recorder.pause():
            keys = super().update_indexer(indexer_key_states, layer_idx)
        cache = ("indexer", layer_idx)
        self._recorder.cached[cache] = (indexer_key_states,)
        self._add_history(cache, (keys[:, None], keys[:, None]))
        return keys

    def _add_history(self, cache: LayerKey, rows: tuple[Tensor, Tensor]) -> None:
        self._recorder.read[cache] = rows
        self._recorder.histories.add(rows, Lineage((cache,)))

    def mask(self, rule: KeyRule, queries: int, device: torch.device) -> Tensor:
        """A tensor of the whole history, behind which the attention's rule is remembered."""
        assert isinstance(rule, MaskRule)
        with self._recorder.pause():
            mask = super().mask(rule, queries, device)
        self._recorder.histories.add([mask], Lineage())
        self._recorder.rules[mask.untyped_storage().data_ptr()] = rule, mask
        return mask

    def distances(self, device: torch.device) -> Tensor:
        with self._recorder.pause():
            distances = super().distances(device)
        self._recorder.histories.add([distances], Lineage())
        return distances

    def history_positions(self) -> Tensor:
        with self._recorder.pause():
            positions = super().history_positions()
        self._recorder.histories.add([positions], Lineage())
        return positions

    def running_table(self, table: Tensor) -> Tensor:
        with self._recorder.pause():
            rows = super().running_table(table)
        self._recorder.histories.add([rows], self._recorder.histories.lineage(table))
        return rows

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        if not self.is_running or self._recorder.paused:
            return super().get_query_offset(layer_idx)
        return self._positions[0, 0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        keys, offset = super().get_mask_sizes(query_length, layer_idx)
        if not self.is_running or self._recorder.paused:
            return keys, offset
        first = torch.tensor(offset)
        self._recorder.histories.add([first], Lineage())
        return keys, first


_CAUSAL = MaskRule(lambda _batch, _head, query, key: key <= query, torch.iinfo(torch.int64).max)

_active: ContextVar[Recorder] = ContextVar("_active")


def _traced_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    recorder = _active.get()
    if is_within_tokens(module, attention_mask):
        return packed_attention(module, query, key, value, attention_mask, **options)
    with recorder.pause():
        output, _ = packed_attention(module, query, key, value, attention_mask, **options)
    if recorder.paused:
        return output, None
    layer = layer_of(recorder.cached | recorder.read, key, value, module.layer_idx)  # type: ignore[arg-type]
    cached = recorder.cached.get(layer)
    if cached is None:
        raise NotDescribed(f"attention {layer} has no cache of its own")
    with recorder.pause():
        beside = _entries_beside(recorder, layer, key, value, attention_mask)
    rule, choice = _CAUSAL, None
    if beside is not None:
        rule = beside.rule
    elif (choice := recorder.choice_of(attention_mask, module)) is None:
        rule = recorder.rule(attention_mask)
    with recorder.pause():
        call = AttentionCall(module, query, key, value, rule, options, output)
        view, latents, order = describe_view(call), None, None
        whole = recorder.read.get(layer, cached)
        if beside is None and (key is not whole[0] or value is not whole[1]):
            if not recorder.histories.has((key, value)):
                raise NotDescribed(f"attention {layer} attends to something else than its cache")
            order = heads_by_key(call, *recorder.read[layer])
            if order is None:
                latents = latents_of(call, *recorder.read[layer])
    others, pool, entries = _others(recorder, layer, view, options), 1, None
    if choice is not None:
        pool, others["chosen"] = choice[0].pool, choice[1]
    if beside is not None:
        if others.keys() - {"sinks"}:
            raise NotDescribed(f"attention {layer} has entries beside its keys, and {[*others]}")
        entries = beside.cache, recorder.rates[beside.cache]
        others |= {"entry": beside.entry} | beside.chosen
    if order is None:
        attends = Attends(layer, view, latents, pool, entries)
        recorder.record("attention", (attends, query, *cached), others, [output])
        return output, None
    query, others = (
        query[:, order],
        {name: x if name == "chosen" else x[order] for name, x in others.items()},
    )
    if view.sinks is not None:
        view = replace(view, sinks=view.sinks[order])
    with recorder.pause():
        ordered = output[:, :, order]
    attends = Attends(layer, view, None, pool)
    recorder.record("attention", (attends, query, *cached), others, [ordered])
    return ordered[:, :, order.argsort()], None


class _Entries(NamedTuple):
    """Entries that an attention reads behind its keys.

    Attributes:
        entry: of the token itself.
        rule: of the keys.
        chosen: positions of the entries that it sees, by that name; empty: it sees all.
    """

    cache: LayerKey
    entry: Tensor
    rule: MaskRule
    chosen: dict[str, Tensor]


def _entries_beside(
    recorder: Recorder, layer: int, key: Tensor, value: Tensor, mask: Any
) -> _Entries | None:
    """The entries behind the keys of an attention; None if there are none."""
    caches = recorder.histories.lineage(key).caches
    beside = [cache for cache in caches if cache in recorder.rates]
    if len(caches) != 2 or len(beside) != 1 or layer not in recorder.read:
        return None
    (cache,) = beside
    if cache not in recorder.cached or not isinstance(mask, Tensor):
        raise NotDescribed(f"attention {layer} reads entries of which none is the token's")
    keys, entries = recorder.read[layer], recorder.read[cache][0]
    tokens = keys[0].shape[2]
    for rows, own in zip((key, value), keys, strict=True):
        if not same(rows, torch.cat([own, entries], 2)) or own.shape[1] != 1:
            raise NotDescribed(f"attention {layer} attends to something else than its caches")
    rules = [rule for rule, its in recorder.rules.values() if same(its, mask[..., :tokens])]
    if not rules:
        raise NotDescribed("a layer changes which keys a token sees")
    seen = mask[0, 0, 0, tokens:]
    positions = (seen if seen.dtype == torch.bool else seen == 0).nonzero()
    chosen = dict[str, Tensor]()
    if len(positions) < len(seen):
        chosen["chosen"] = positions_chosen(positions, recorder.histories.lineage(mask))
    return _Entries(cache, recorder.cached[cache][0], rules[0], chosen)


def _others(
    recorder: Recorder, layer: int, view: View, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the inputs of an attention beside the token's query: chosen keys, biases and sinks."""
    others = dict[str, Tensor]()
    for name, option in options.items():
        if not isinstance(option, Tensor) or name == "position_ids":
            continue
        if name in ("s_aux", "sinks"):
            if isinstance(recorder.value(option), Value):
                others["sinks"] = option.reshape(-1)
        elif name == "indices":
            with recorder.pause():
                lineage = recorder.histories.lineage(option)
                others["chosen"] = positions_chosen(option, lineage)
        elif name == "position_bias" and view.softcap is None:
            with recorder.pause():
                bias, factors = biases_of(recorder.histories.lineage(option), option)
            for factor in factors:
                bias = bias * factor.reshape(())
            others["bias"] = bias
        else:
            raise NotDescribed(f"attention {layer} takes {name}")
    if "chosen" in others and view.window is not None:
        raise NotDescribed(f"attention {layer} has chosen keys and a window")
    return others


AttentionInterface.register(TRACED, _traced_attention)
AttentionMaskInterface.register(TRACED, packed_mask)


@contextmanager
def _recording(backbone: Backbone, recorder: Recorder, cache: PackedCache) -> Iterator[None]:
    token = _active.set(recorder)
    for module in backbone.model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = TRACED
    try:
        with as_torch_does(), packed_pass(cache), ListsRead(recorder), recorder:
            yield
    finally:
        _active.reset(token)
        backbone.set_packed(True)


def _recorded_forwards(
    backbone: Backbone, recorder: Recorder
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The modules that are recorded as one operation, and their forward meanwhile."""
    embedding = backbone.model.get_input_embeddings()

    def embed(own: Callable[..., Any], ids: Tensor) -> Tensor:
        with recorder.pause():
            rows: Tensor = own(ids)
        recorder.give(rows, Space.EMBEDDED)
        return rows

    yield embedding, embed
    for module in backbone.model.modules():
        if isinstance(module, QuantizedLinear):
            yield module, _projection(recorder, describe_projection(module))
        elif (matrices := _matrices_of(module)) is not None:
            yield module, _selected_projection(recorder, matrices)
        elif not any(True for _ in module.parameters()) and any(True for _ in module.buffers()):
            yield module, _table(recorder, module)
    for _, module in experts_modules(backbone.model):
        yield module, _experts(recorder, module.expert_seat.layer)


def _projection(recorder: Recorder, projection: Projection) -> Callable[..., Any]:
    def forward(own: Callable[..., Any], rows: Tensor) -> Tensor:
        with recorder.pause():
            output: Tensor = own(rows)
        if recorder.histories.has((rows,)):
            recorder.histories.add([output], recorder.histories.lineage(rows))
        elif not recorder.paused:
            recorder.record("projection", (projection, rows), {}, [output])
        return output

    return forward


def _table(recorder: Recorder, module: nn.Module) -> Callable[..., Any]:
    """A function in place of a table of all tokens' positions, the last of which is the token's."""

    def forward(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        given = [x for x in tensors if recorder.histories.has((x,))]
        met = recorder.histories.lineage(given[0]).met if len(given) == 1 else ()
        if recorder.paused or len(met) != 1:
            return own(*args, **kwargs)

        def of(positions: Tensor) -> Any:
            def put(x: Any) -> Any:
                return positions.expand(*given[0].shape[:-1], -1) if x is given[0] else x

            return own(*map(put, args), **{name: put(x) for name, x in kwargs.items()})

        @torch.inference_mode()
        def rotate(positions: Tensor) -> Any:
            return of(positions)

        last = of(met[0].tensor)
        with recorder.pause():
            whole = own(*args, **kwargs)
            recorder.tables.append(RotaryTable(rotate, of_length=depends_on_length(module)))
        for rows, row in zip(whole, last, strict=True):
            recorder.histories.add([rows], Lineage(last=row))
        return whole

    return forward


def _matrices_of(module: nn.Module) -> Tensor | None:
    """The ``(E, rows, columns)`` weight of a module that has nothing else."""
    parameters = list(module.parameters())
    if not owns_stack(module) or len(parameters) != 1 or parameters[0].ndim != 3:
        return None
    weight = parameters[0].detach()
    return weight if weight.dtype == torch.float32 and weight.is_contiguous() else None


def _selected_projection(recorder: Recorder, matrices: Tensor) -> Callable[..., Any]:
    """A function in place of a product of rows sorted by matrix, with each matrix's row count."""

    def forward(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sizes = [x for x in args if isinstance(x, ReadList) and len(x) == len(matrices)]
        rows = [x for x in args if isinstance(x, Tensor) and recorder.varies(x)]
        if recorder.paused or kwargs or not len(sizes) == len(rows) == 1:
            return own(*args, **kwargs)
        ends = sizes[0].tensor.cumsum(0).clamp_max(len(rows[0]))
        places = torch.arange(len(rows[0]), device=matrices.device)
        ids = torch.searchsorted(ends, places, right=True).clamp_max(len(matrices) - 1)
        with recorder.pause():
            output: Tensor = own(*args)
            if not close(torch.einsum("rnk,rk->rn", matrices[ids], rows[0]), output, 1e-4):
                raise NotDescribed("rows choose their matrices in a way that is not known here")
        recorder.record("selected_projection", (matrices, rows[0], ids), {}, [output])
        return output

    return forward


def _experts(recorder: Recorder, layer: int) -> Callable[..., Any]:
    def forward(_own: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if hidden.numel() != hidden.shape[-1]:
            raise NotDescribed("experts read several rows of a token")
        with recorder.pause():
            output = hidden * (0.25 + weights.sum(-1, keepdim=True))
        recorder.record("experts", (layer, hidden, ids, weights), {}, [output])
        return output

    return forward


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own, before = module.forward, module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: forward(own, *args, **kwargs)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
