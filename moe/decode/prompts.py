"""Prompts through transformers' layers, with norms, rotations and attention compiled.

Norm modules, and attention modules with grouped queries, are replaced by the compiled functions of
the decode step, which compute each row by itself. Matrix products, routers, experts and residuals
stay transformers'. Legend: T new tokens, Q query heads, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.cpu.decode import NormRecord
from kernels.cpu.dense import NativeNorms
from moe.cache_dir.proofs import current_proofs, outline
from moe.decode.proof import PROMPT_LENGTHS, caches_of, parts_of, read_plainly, tolerance_of
from moe.decode.records import DescriptionRecords, point_to_table
from moe.describe.description import Attention, Description, Norm, NotDescribed
from moe.describe.observe import ObservedCall
from moe.describe.probe import ComparedRun, compare, random_prompts
from moe.network.attention import PACKED, MaskRule, current_pass, packed_attention
from moe.network.backbone import Backbone
from moe.network.packed_pass import PackedCache
from moe.network.seam import parents_of

Forward = Callable[..., Any]


@torch.inference_mode()
def fuse_prompts(backbone: Backbone, description: Description, native: NativeNorms) -> str:
    """Compile norms and attention of prompts if that gives the same; says what was done."""
    records = DescriptionRecords()
    changed = [
        *_norms(description, records, native),
        *_attentions(backbone, description, records, native),
    ]
    before = {module: vars(module).get("forward") for module, _ in changed}

    def change() -> None:
        for module, forward in changed:
            module.forward = partial(forward, module.forward)

    def holds() -> bool:
        expected = _read(backbone)
        change()
        try:
            compare(expected, _read(backbone), caches_of(description), tolerance_of(description))
        finally:
            for module, own in before.items():
                vars(module).pop("forward", None)
                if own is not None:
                    module.forward = own
        return True

    try:
        current_proofs().recall("prompts in parts", outline(description), bool, holds, NotDescribed)
    except Exception as error:  # as in `enable_fused`: an architecture may do anything
        return f"prompts left to transformers: {type(error).__name__}: {error}"
    change()
    return "prompts by compiled norms and positions"


def _read(backbone: Backbone) -> ComparedRun:
    """Read prompts, and then more tokens of each."""
    prompts = random_prompts(backbone, PROMPT_LENGTHS)
    run = ComparedRun([backbone.new_cache(2 * len(ids)).kv for ids in prompts])
    for tokens in (prompts, [ids[::-1] for ids in prompts]):
        read_plainly(backbone, tokens, run)
    return run


def _norms(
    description: Description, records: DescriptionRecords, native: NativeNorms
) -> Iterator[tuple[nn.Module, Forward]]:
    for norm in parts_of(description, Norm):
        if norm.leaf is not None:
            yield norm.leaf, partial(_normed, native, records.norm(norm))


def _normed(
    native: NativeNorms, record: NormRecord, forward: Forward, *args: Any, **kwargs: Any
) -> Any:
    if kwargs or len(args) != 1 or not native.supports(args[0]):
        return forward(*args, **kwargs)
    return native.norm(record, args[0])


def _attentions(
    backbone: Backbone, description: Description, records: DescriptionRecords, native: NativeNorms
) -> Iterator[tuple[nn.Module, Forward]]:
    parents = parents_of(backbone.model)
    for attention in parts_of(description, Attention):
        module = parents[attention.o.leaf]
        if attention.rotation is not None and attention.rotation.table.of_length:
            continue  # its table is that of decode steps
        yield module, PromptAttention(attention, module, records, native)


class PromptAttention:
    """Replaces an attention module's forward for packed prompts.

    Args:
        module: one that dispatches through transformers' attention interface.
    """

    def __init__(
        self,
        attention: Attention,
        module: nn.Module,
        records: DescriptionRecords,
        native: NativeNorms,
    ) -> None:
        self._attention, self._module, self._native = attention, module, native
        self._records, (self._queries, self._keys) = records, records.heads(attention)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        cache, given = current_pass.get(None), ObservedCall(args, kwargs, ())
        rules = [value for value in (*args, *kwargs.values()) if isinstance(value, MaskRule)]
        way: Any = self._module.config
        packed = cache is not None and not cache.decoding and way._attn_implementation == PACKED
        if not packed or len(rules) != 1 or not self._native.supports(given.hidden):
            return forward(*args, **kwargs)
        assert cache is not None
        if cache.places_given:  # in several dimensions, which compiled rotations do not know
            return forward(*args, **kwargs)
        return self._attend(given.hidden, rules[0], cache), None

    def _attend(self, hidden: Tensor, rule: MaskRule, cache: PackedCache) -> Tensor:
        """``(1, T, H)``: what the module would return."""
        a = self._attention
        q, k, v = (p.leaf(hidden) for p in (a.q, a.k, a.v))
        self._turn(q, k, cache)
        keys, values = cache.update(_heads(k, a.kv_heads), _heads(v, a.kv_heads), a.layer)
        view: dict[str, Any] = {"s_aux": a.view.sinks, "softcap": a.view.softcap}
        q = _heads(q, a.heads)
        output, _ = packed_attention(self._module, q, keys, values, rule, a.view.scale, **view)
        return a.o.leaf(output.flatten(2))

    def _turn(self, q: Tensor, k: Tensor, cache: PackedCache) -> None:
        rotation, positions = self._attention.rotation, cache.positions()
        for rows, heads in ((q, self._queries), (k, self._keys)):
            if rotation is not None:
                rotation.table.reserve(max(cache.ends))
                point_to_table(heads.rotation, rotation.table)
            self._native.turn(heads, rows, positions)


def _heads(rows: Tensor, count: int) -> Tensor:
    """``(1, T, heads * D)`` as ``(1, heads, T, D)``."""
    return rows.unflatten(-1, (count, -1)).transpose(1, 2)
