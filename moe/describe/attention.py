"""Describes attention modules, from their leaves' names and one observed pass.

Two kinds are known: grouped queries, and latent attention (MLA). Steps by a description never
expand a latent cache to heads: queries go to the latent space instead, and the sum of latents comes
back (both halves of ``kv_b`` absorbed; DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels.planes import dequantize
from moe.describe.description import (
    Attention,
    HeadNorm,
    LatentAttention,
    Norm,
    NotDescribed,
    Projection,
    RotaryTable,
    Rotation,
    View,
)
from moe.describe.observe import AttentionCall, Observation, RotaryModules, observe_random
from moe.describe.parts import (
    child_of,
    close,
    describe_norm,
    describe_projection,
    describe_rotation,
    rotate,
    same,
)
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.network.attention import MaskRule
from moe.network.backbone import Backbone

_FAR = 1 << 20
"""A position far beyond any window."""

_LARGE = 2.0**15  # float16 ends at 65,504

OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
_Q_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "query_norm")
_K_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "key_norm")


def describe_attention(
    call: AttentionCall, seen: Observation, rotaries: RotaryModules
) -> Attention:
    """Raises `NotDescribed` if the module does something that a description cannot express."""
    module = call.module
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    kv_heads, value_dim = call.value.shape[1], call.value.shape[3]
    q, k, v = _queries_keys_values(module, heads * head_dim, kv_heads * head_dim)
    embeddings = rotaries.table(position_embeddings(seen, module))
    query, key, value = (_rows(tensor) for tensor in (call.query, call.key, call.value))
    if not same(seen.only(v.leaf).output, value):
        raise NotDescribed("values are not what the value projection gives")
    q_norm, q_turn = _chain(module, _Q_NORMS, q, query, seen, embeddings)
    k_norm, k_turn = _chain(module, _K_NORMS, k, key, seen, embeddings)
    if q_turn != k_turn:
        raise NotDescribed("queries and keys are rotated differently")
    return Attention(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        q=q, k=k, v=v, o=describe_output(call, seen),
        q_norm=q_norm, k_norm=k_norm, rotation=q_turn, view=describe_view(call),
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
    )  # fmt: skip


def describe_output(call: AttentionCall, seen: Observation) -> Projection:
    """The output projection; nothing else may lie between the heads and the layer."""
    leaf = child_of(call.module, OUTPUTS)
    if leaf is None:
        raise NotDescribed(f"no output projection among {', '.join(OUTPUTS)}")
    _check_output(leaf, call, seen)
    return describe_projection(leaf)


def _check_output(leaf: nn.Module, call: AttentionCall, seen: Observation) -> None:
    made = seen.only(leaf)
    if not same(made.hidden, call.output) or not same(made.output, seen.only(call.module).output):
        raise NotDescribed("more than a projection lies between the heads and the layer")


def check_attention(a: Attention | LatentAttention, call: AttentionCall, seen: Observation) -> None:
    """Raise `NotDescribed` where attention reads other rows in another pass than described."""
    table = None if a.rotation is None else a.rotation.table
    _check_output(a.o.leaf, call, seen)
    if isinstance(a, Attention):
        if not same(seen.only(a.v.leaf).output, _rows(call.value)):
            raise NotDescribed("values are not what the value projection gives")
        for names, part, rows in ((_Q_NORMS, a.q, call.query), (_K_NORMS, a.k, call.key)):
            _, turn = _chain(call.module, names, part, _rows(rows), seen, table)
            if not _is_alike(turn, a.rotation):
                raise NotDescribed("queries or keys are rotated otherwise")
        return
    query, sizes = _rows(call.query), [a.plain_dim, a.rotation.size]
    plain, turned = seen.only(a.q.leaf).output.reshape(query.shape).split(sizes, -1)
    turned = rotate(a.rotation, turned, *a.rotation.table.at(seen.positions[0]))
    if not any(close(torch.cat(parts, -1), query) for parts in permutations((plain, turned))):
        raise NotDescribed("queries are changed by something other than a known rotation")


def _is_alike(a: Rotation | None, b: Rotation | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.style, a.begin, a.size) == (b.style, b.begin, b.size)


def describe_view(call: AttentionCall) -> View:
    """Scale, cap and sinks as passed to attention; which keys are visible, by the mask's rule."""
    sinks, softcap = call.options.get("s_aux"), call.options.get("softcap")
    scale = call.options.get("scaling")
    view = View(
        scale=float(call.query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else sinks.detach().float().reshape(-1).clone(),
    )
    rule = call.rule
    if not isinstance(rule, MaskRule):
        raise NotDescribed("which keys a query sees is the model's own choice")
    spans = [(at, _visible(rule, at)) for at in (_FAR, _FAR + 1, _FAR + 777, 1000, 3)]
    if all(begin == 0 for _, begin in spans):
        return view
    window = replace(view, window=_FAR - spans[0][1] + 1)
    if all(begin == window.first_key(at + 1) for at, begin in spans):
        return window
    second = bisect_left(range(_FAR), True, key=lambda at: _visible(rule, at) > 0)
    chunks = replace(view, chunk=second)
    if all(begin == chunks.first_key(at + 1) for at, begin in spans):
        return chunks
    raise NotDescribed("which keys a query sees follows no window and no chunks")


def seen_windows(backbone: Backbone, form: KVFormat) -> Windows:
    """The attention layers that see no more than their last tokens; on the meta device, too.

    None unless each layer's keys and values are read by one module, its own.

    Args:
        form: how keys and values will be stored; the backbone's sequences have them in buffers.
    """
    seen = observe_random(backbone)
    kept = [layer for layer in seen.sequences[0].layers if isinstance(layer, int)]
    views: dict[int, View] = {}
    for call in seen.attention:
        with suppress(NotDescribed):
            views[int(call.module.layer_idx)] = describe_view(call)  # type: ignore[arg-type]
    if len(seen.attention) != len(kept) or not views.keys() <= set(kept):
        return Windows()
    found = {layer: view.window for layer, view in views.items() if view.window is not None}
    return Windows.of(found, seen.sequences[0].layer_bytes(form))


def check_views(backbone: Backbone) -> None:
    """Raise `NotDescribed` unless each layer of attention sees all tokens or its last ones, some
    layer sees all, and each layer's keys and values are read by one module, its own."""
    seen = observe_random(backbone)
    layers = [int(call.module.layer_idx) for call in seen.attention]  # type: ignore[arg-type]
    if len(layers) > len(set(layers)) or set(layers) != set(seen.sequences[0].layers):
        raise NotDescribed("not each layer keeps keys and values that one module reads")
    views = [describe_view(call) for call in seen.attention]
    if backbone.history_layers:
        raise NotDescribed("it computes with all keys before it attends, as latent attention does")
    if any(view.chunk is not None for view in views):
        raise NotDescribed("some layers see chunks of tokens")
    if all(view.window is not None for view in views):
        raise NotDescribed("no layer sees all tokens")


def position_embeddings(seen: Observation, module: nn.Module) -> Any:
    """The position embeddings that an attention module was called with."""
    call = seen.only(module)
    return call.kwargs.get("position_embeddings", call.inputs[1] if len(call.inputs) > 1 else None)


@lru_cache(maxsize=64)  # layers share rules, and far positions take a while
def _visible(rule: MaskRule, position: int) -> int:
    """First key that a query at ``position`` sees; it must see all from there to itself."""
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(position + 1)
    seen = rule.allows(zero, zero, torch.tensor([[position]]), keys[None]).reshape(-1)
    seen = seen.expand(position + 1)
    first = int(seen.int().argmax())
    if not bool(seen[first:].all()):
        raise NotDescribed("a query sees keys with gaps between them")
    return first


def _chain(
    module: nn.Module, names: Sequence[str], projection: Projection, final: Tensor,
    seen: Observation, table: RotaryTable | None,
) -> tuple[HeadNorm | None, Rotation | None]:  # fmt: skip
    """Norm and rotation between a projection's rows and the ``(T, heads, D)`` that attend."""
    projected, child = seen.only(projection.leaf).output, child_of(module, names)
    norm_call = seen.call(child) if child is not None else None
    before, norm = projected.reshape(final.shape), None
    after = final
    if child is not None and norm_call is not None:
        size = norm_call.hidden.shape[-1]
        norm = HeadNorm(describe_norm(child, size), per_head=size == final.shape[-1])
        if same(_as_rows(norm_call.hidden, final), projected):
            before = _as_rows(norm_call.output, final)
        elif same(_as_rows(norm_call.output, final), final):
            norm = replace(norm, after_rotation=True)
            after = _as_rows(norm_call.hidden, final)
        else:
            raise NotDescribed("a query or key norm is neither first nor last")
    if table is None:
        if not same(before, after):
            raise NotDescribed("queries or keys change without position embeddings")
        return norm, None
    return norm, describe_rotation(before, after, table, seen.positions[0])


def _queries_keys_values(
    module: nn.Module, q_rows: int, k_rows: int
) -> tuple[Projection, Projection, Projection]:
    leaves = [child_of(module, (name,)) for name in ("q_proj", "k_proj", "v_proj")]
    if any(leaf is None for leaf in leaves):
        raise NotDescribed("no q_proj, k_proj and v_proj")
    q, k, v = (describe_projection(leaf) for leaf in leaves if leaf is not None)
    if q.rows != q_rows or k.rows != k_rows:
        raise NotDescribed("queries or keys are not what their projections give")
    return q, k, v


def _rows(heads: Tensor) -> Tensor:
    """``(1, heads, T, D)`` to ``(T, heads, D)``."""
    return heads[0].transpose(0, 1)


def _as_rows(states: Tensor, final: Tensor) -> Tensor:
    """Return a norm's input, ``(1, heads, T, D)`` or rows already, as ``(T, heads, D)``."""
    heads_first = states.ndim == 4 and states.shape[1] == final.shape[1] != states.shape[2]
    return _rows(states) if heads_first else states.reshape(final.shape)


def is_latent(module: nn.Module) -> bool:
    """Return whether an attention module has leaves of latent attention."""
    return child_of(module, ("kv_b_proj",)) is not None


def describe_latent(
    call: AttentionCall, seen: Observation, rotaries: RotaryModules
) -> LatentAttention:
    """Raises `NotDescribed` if the module does something that a description cannot express."""
    module = call.module
    heads, value_dim = call.query.shape[1], call.value.shape[3]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    stored = [s.read(layer, s.length) for s in seen.sequences]
    latent = torch.cat([keys for keys, _ in stored], 2)[0, 0]
    turned = torch.cat([values for _, values in stored], 2)[0, 0]
    size, rotated = latent.shape[1], turned.shape[1]
    plain_dim = call.query.shape[3] - rotated
    q_a, q_a_norm, q = _queries(module)
    kv_a = describe_projection(_need(module, ("kv_a_proj_with_mqa", "kv_a_proj")))
    kv_norm = describe_norm(_need(module, ("kv_a_layernorm", "kv_a_norm")), size)
    table = rotaries.table(position_embeddings(seen, module))
    if table is None or kv_a.rows != size + rotated:
        raise NotDescribed("the latent row is not a latent and a rotated key")
    unturned = seen.only(kv_a.leaf).output[0, :, size:]
    rotation = describe_rotation(unturned[:, None], turned[:, None], table, seen.positions[0])
    if rotation is None:
        raise NotDescribed("latent attention without rotation")
    leaf = _need(module, ("kv_b_proj",))
    return LatentAttention(
        layer=layer, q_a=q_a, q_a_norm=q_a_norm, q=q, kv_a=kv_a, kv_norm=kv_norm,
        kv_b=expansion_of(leaf, heads, plain_dim + value_dim, size), kv_b_leaf=leaf,
        o=describe_output(call, seen),
        rotation=rotation, view=describe_view(call), heads=heads,
        plain_dim=plain_dim, value_dim=value_dim,
    )  # fmt: skip


def _queries(module: nn.Module) -> tuple[Projection | None, Norm | None, Projection]:
    first = child_of(module, ("q_a_proj",))
    if first is None:
        return None, None, describe_projection(_need(module, ("q_proj",)))
    down = describe_projection(first)
    norm = describe_norm(_need(module, ("q_a_layernorm", "q_a_norm")), down.rows)
    return down, norm, describe_projection(_need(module, ("q_b_proj",)))


def expansion_of(leaf: nn.Module, heads: int, rows: int, size: int) -> torch.Tensor:
    """The weight of a leaf that expands latents to heads, ``(heads, plain + value, R)`` float32."""
    if getattr(leaf, "bias", None) is not None:
        raise NotDescribed("keys and values have a bias behind the latent")
    weight = describe_projection(leaf).weight
    if not isinstance(weight, torch.Tensor):
        weight = dequantize(weight.planes, weight.scales, weight.layout)
    if weight.shape != (heads * rows, size):
        raise NotDescribed("the expansion of latents has other sizes than the heads")
    return weight.float().reshape(heads, rows, size).contiguous()


def halved(expansion: torch.Tensor, leaf: nn.Module) -> torch.Tensor:
    """An expansion as a step on a CPU reads it: of bit planes in float16, half of the bytes."""
    if not isinstance(leaf, QuantizedLinear) or not expansion.abs().max() < _LARGE:
        return expansion
    return expansion.half()


def _need(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    child = child_of(module, names)
    if child is None:
        raise NotDescribed(f"latent attention without {names[0]}")
    return child
