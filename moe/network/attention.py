"""Attention over sequences packed into one row, registered with transformers' attention registry.

transformers builds its masks from small index functions (causal, sliding window, chunked) and hands
the result to the attention function untouched. We register a mask function that keeps the index
function itself (`MaskRule`), and evaluate it for each sequence with that sequence's own positions.
So every masking rule of transformers is right in a packed row, without naming an architecture.
Legend: T packed tokens, Q query heads, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from kernels.cpu import choose_kernel
from kernels.cpu.dense import BlockRows
from moe.kv.cache import KVCache
from moe.network.packed_pass import PackedCache, layer_of

PACKED = "moe_packed"
"""Name of this implementation in transformers' registries."""

_QUERIES = 256
"""Queries whose masks are in memory at a time."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query may see: ``allows(batch, head, query_position, key_position)``."""

    allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    window: int | None

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """``(queries, keys)`` bool for the last ``queries`` positions of a sequence of ``keys``.

        None if it is all true, or plainly causal from the start (`is_causal`).
        """
        if self.is_plain(keys) and queries in (1, keys):
            return None
        return self.evaluate(queries, keys, device)

    def is_causal(self, queries: int, keys: int) -> bool:
        return self.is_plain(keys) and queries == keys and queries > 1

    def evaluate(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The rule for the last queries and all keys; the shape broadcasts to both."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        positions = torch.arange(keys, device=device)
        return self.allows(zero, zero, positions[keys - queries :, None], positions[None, :])

    def is_plain(self, keys: int) -> bool:
        """Return whether each of ``keys`` tokens sees all tokens up to itself."""
        return self.window is not None and keys <= self.window


@lru_cache(maxsize=8)  # the layers of a pass share rules
def first_keys(
    rule: MaskRule, queries: int, keys: int, device: torch.device = _CPU
) -> Tensor | None:
    """``(queries,)`` int64: the first key that each of the last queries sees.

    It sees all keys from there to its own; None if the rule leaves gaps.
    """
    if rule.is_plain(keys):
        return torch.zeros(queries, dtype=torch.long, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    at = torch.arange(keys, device=device)
    found, without_gaps = [], torch.ones((), dtype=torch.bool, device=device)
    for own in at[keys - queries :].split(_QUERIES):  # masks of a long prompt would fill memory
        mask = rule.allows(zero, zero, own[:, None], at[None, :]).expand(len(own), keys)
        first = mask.byte().argmax(1)
        between = (at >= first[:, None]) & (at <= own[:, None])
        without_gaps &= (mask == between).all()
        found.append(first)
    return torch.cat(found) if bool(without_gaps) else None


def packed_mask(
    *,
    mask_function: Callable[..., Tensor],
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **_: Any,
) -> MaskRule:
    """Mask interface of transformers: keep the rule in place of a tensor.

    Args:
        allow_is_causal_skip: the rule is plainly causal up to ``local_size`` tokens.
    """
    window = None
    if allow_is_causal_skip:
        window = local_size if local_size is not None else torch.iinfo(torch.int64).max
    return MaskRule(mask_function, window)


current_pass: ContextVar[PackedCache] = ContextVar("current_pass")
"""The cache of the running lane's pass; every greenlet has a context of its own."""


@contextmanager
def packed_pass(cache: PackedCache) -> Iterator[None]:
    """Let attention read and write through ``cache``."""
    token = current_pass.set(cache)
    try:
        yield
    finally:
        current_pass.reset(token)


AttentionObserver = Callable[..., None]
"""Called for each sequence and layer: ``(layer, (1, Q, T, D) queries, (1, N, L, D) keys, rule,
scaling, sinks, softcap)``."""
_observer: ContextVar[AttentionObserver | None] = ContextVar("observer", default=None)


@contextmanager
def observed_attention(observer: AttentionObserver) -> Iterator[None]:
    """Call ``observer`` with the queries and keys of all packed attention within."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention interface of transformers for one packed row.

    Args:
        module: with a ``layer_idx``; attention without one has no keys of other tokens: it sums up
            rows of each token by itself, which stand where heads do.
        query: ``(1, Q, T, D)``.
        key, value: what `PackedCache.update` returned, or what the module made of it.
        attention_mask: the layer's rule; a mask of a module that sees one sequence at a time.

    Returns:
        ``(1, T, Q, D)``, and no attention weights.
    """
    if is_within_tokens(module, attention_mask):
        sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
        return _attend_masked(query, key, value, None, scaling, sinks, softcap).contiguous(), None
    cache = current_pass.get()
    layer = layer_of(cache.returned, key, value, module.layer_idx)  # type: ignore[arg-type]
    if cache.is_running and isinstance(attention_mask, Tensor):
        mask = _chosen(attention_mask, kwargs.get("indices"), kwargs.get("position_bias"))
        sinks, softcap = kwargs.get("s_aux", kwargs.get("sinks")), kwargs.get("softcap")
        rows = _attend_masked(query, key, value, mask, scaling, sinks, softcap)
        return rows.contiguous(), None
    if not isinstance(attention_mask, MaskRule):
        raise TypeError(f"expected the layer's mask rule, got {type(attention_mask).__name__}")
    seen = _per_sequence(cache, layer, key, value)
    how = attention_mask, scaling, kwargs.get("s_aux"), kwargs.get("softcap")
    if (observer := _observer.get()) is not None:
        for q, own in zip(query.split(cache.sizes, dim=2), seen, strict=True):
            observer(layer, q, own.read()[0], *how)
    if cache.rows_pass is not None and not any(map(_leaves_out, seen)):
        made = None if seen[0].cached is not None else (key, value)
        rule, scale, sinks, softcap = how
        firsts = partial(first_keys, rule, device=query.device)
        found = cache.rows_pass.attend(query, layer, made, firsts, rule, scale, softcap, sinks)
        if found is not None:
            return found, None
    queries = query.split(cache.sizes, dim=2)
    # Compiled attention first rearranges the keys, which does not pay for few queries.
    attend = _attend_steps if cache.decoding else _attend_prompt
    outputs = [attend(q, rows, *how) for q, rows in zip(queries, seen, strict=True)]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).contiguous(), None


def is_within_tokens(module: nn.Module, attention_mask: object) -> bool:
    """Return whether attention reads nothing but rows of the token itself: without a layer's cache,
    and without a mask."""
    return attention_mask is None and not hasattr(module, "layer_idx")


class SeenRows(NamedTuple):
    """The keys and values of one sequence in one layer: of its cache, or made by the module.

    Attributes:
        tokens: L.
    """

    tokens: int
    cached: tuple[KVCache, int] | None = None
    made: tuple[Tensor, Tensor] | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """``(1, N, L, D)`` each."""
        if self.cached is None:
            assert self.made is not None
            return self.made
        sequence, layer = self.cached
        return sequence.read(layer, self.tokens)

    def in_blocks(self) -> BlockRows | None:
        """Return the place of the rows; None if they are not in blocks."""
        if self.cached is None:
            return None
        sequence, layer = self.cached
        return sequence.in_blocks(layer, self.tokens)


def _leaves_out(seen: SeenRows) -> bool:
    """Return whether the last token does not attend to all that its layer's rule lets it see."""
    return seen.cached is not None and seen.cached[0].seen(seen.tokens - 1) is not None


def _per_sequence(cache: PackedCache, layer: int, key: Tensor, value: Tensor) -> list[SeenRows]:
    returned = cache.returned.pop(layer, None)
    if returned is not None and returned[0] is key and returned[1] is value:
        pairs = zip(cache.sequences, cache.ends, strict=True)
        return [SeenRows(end, cached=(sequence, layer)) for sequence, end in pairs]
    if layer not in cache.needs_history:
        cache.needs_history.add(layer)
        if any(sequence.length for sequence in cache.sequences):
            raise RuntimeError(f"layer {layer} needed its history and did not get it")
    parts = zip(key.split(cache.ends, dim=2), value.split(cache.ends, dim=2), strict=True)
    return [SeenRows(end, made=made) for end, made in zip(cache.ends, parts, strict=True)]


def _attend_prompt(
    query: Tensor,
    seen: SeenRows,
    rule: MaskRule,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """As `_attend`; if compiled, a token's bits do not depend on how its prompt is read: whole, in
    chunks, or behind a cached prefix."""
    native, _ = choose_kernel()
    if native is not None and native.attention.supports(query):
        first = first_keys(rule, query.shape[2], seen.tokens)
        how = query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks
        if first is not None and (rows := seen.in_blocks()) is not None:
            return native.attention.attend_blocks(query[0], rows, first, *how)[None]
        key, value = seen.read()
        if first is not None and native.attention.supports(key, value):
            return native.attention.attend(query[0], key[0], value[0], first, *how)[None]
    return _attend(query, *seen.read(), rule, scaling, sinks, softcap)


def _attend_steps(query: Tensor, seen: SeenRows, *how: Any) -> Tensor:
    """As `_attend`, one query at a time: torch sums several in another order, and a step that
    verifies drafted tokens must give the bits of steps that read them one by one."""
    key, value = seen.read()
    ends = range(key.shape[2] - query.shape[2] + 1, key.shape[2] + 1)
    outputs = []
    for q, end in zip(query.split(1, 2), ends, strict=True):
        own = key[:, :, :end], value[:, :, :end]
        left = None if seen.cached is None else seen.cached[0].seen_mask(seen.cached[1], q, own[0])
        if left is None:
            outputs.append(_attend(q, *own, *how))
        else:  # the layer's rule adds nothing, as it lets a token see all
            by_query = left.repeat_interleave(q.shape[1] // left.shape[0], 0)
            outputs.append(_attend_masked(q, *own, by_query[None, :, None], *how[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """One sequence: ``(1, Q, T, D)`` against ``(1, N, L, D)`` gives ``(1, T, Q, Dv)``."""
    queries, keys = query.shape[2], key.shape[2]
    mask = rule.mask(queries, keys, query.device)
    causal = rule.is_causal(queries, keys)
    return _attend_masked(query, key, value, mask, scaling, sinks, softcap, causal)


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool = False,
) -> Tensor:
    """As `_attend`, where ``mask`` allows; ``causal``: each token sees all up to itself."""
    if sinks is None and softcap is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)  # fmt: skip
    if causal:
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    probabilities = _probabilities(query, key, mask, scaling, sinks, softcap)
    group = query.shape[1] // key.shape[1]
    return (probabilities.to(query.dtype) @ value.repeat_interleave(group, 1)).transpose(1, 2)


def _chosen(mask: Tensor, indices: Tensor | None, bias: Tensor | None) -> Tensor:
    """The ``(1, 1, T, L)`` bool mask, of the keys that an indexer chose ``(1, T, K)``; with a bias,
    ``(1, Q, T, L)`` scores to be added."""
    if indices is not None:
        mask = mask & torch.zeros_like(mask[:, 0]).scatter(-1, indices.long(), True)[:, None]
    return mask if bias is None else bias.masked_fill(~mask, -float("inf"))


def _probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """``(1, Q, T, L)`` float32 attention weights; sinks take the rest of each row."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -float("inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        by_head = sinks.view(1, -1, 1, 1) if sinks.ndim == 1 else sinks  # else of each token, too
        column = by_head.to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]]


def attention_weights(
    query: Tensor,
    key: Tensor,
    rule: MaskRule,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """``(1, Q, T, L)`` float32, of the last T of L tokens."""
    mask = rule.evaluate(query.shape[2], key.shape[2], query.device)
    return _probabilities(query, key, mask, scaling, sinks, softcap)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, packed_mask)
