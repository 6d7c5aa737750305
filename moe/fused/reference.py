"""A decode step by description in plain torch: slow, obvious, and what the compiled one must equal.

Legend: B sequences, one new token each; H hidden, Q query heads, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.fused.description import (
    Attention,
    Description,
    Experts,
    FeedForward,
    HeadNorm,
    LatentAttention,
    Layer,
    OwnRouter,
    View,
)
from moe.fused.parts import ACTIVATIONS, apply_norm, project, rotate
from moe.fused.router import route
from moe.kv import SequenceKV
from routing import Routing

Visitor = Callable[[int, Tensor, Routing], Tensor]
"""Runs the routed experts of one MoE layer: ``(layer, rows, routing) -> rows``."""


def reference_step(
    description: Description,
    token_ids: Sequence[int],
    sequences: Sequence[SequenceKV],
    visit: Visitor,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Read one token of each sequence.

    Returns:
        ``(B, V)`` float32 logits; each sequence is one token longer.
    """
    x = description.embedding(torch.tensor(token_ids)).float() * description.embedding_scale
    positions = torch.tensor([sequence.length for sequence in sequences])
    for index, layer in enumerate(description.layers):
        if layer.attention.rotation is not None:
            layer.attention.rotation.table.reserve(int(positions.max()) + 1)
        x = _layer(layer, x, positions, sequences, visit)
        if watch is not None:
            watch(index, x)
    logits = project(description.head, apply_norm(description.norm, x)) * description.logit_scale
    for sequence in sequences:
        sequence.length += 1
    cap = description.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _layer(
    layer: Layer, x: Tensor, positions: Tensor, sequences: Sequence[SequenceKV], visit: Visitor
) -> Tensor:
    rows = x if layer.attention_norm is None else apply_norm(layer.attention_norm, x)
    rows = _attend(layer.attention, rows, positions, sequences)
    if layer.attention_post_norm is not None:
        rows = apply_norm(layer.attention_post_norm, rows)
    x = x + layer.attention_scale * rows
    rows = x if layer.feed_norm is None else apply_norm(layer.feed_norm, x)
    rows = _feed(layer.feed, rows, visit)
    if layer.feed_post_norm is not None:
        rows = apply_norm(layer.feed_post_norm, rows)
    return x + layer.feed_scale * rows


def _attend(
    a: Attention | LatentAttention, rows: Tensor, positions: Tensor, sequences: Sequence[SequenceKV]
) -> Tensor:
    if isinstance(a, LatentAttention):
        return _attend_latent(a, rows, positions, sequences)
    q = _turned(project(a.q, rows), a.heads, a.q_norm, a, positions)
    k = _turned(project(a.k, rows), a.kv_heads, a.k_norm, a, positions)
    v = project(a.v, rows).unflatten(-1, (a.kv_heads, a.value_dim))
    group = a.heads // a.kv_heads
    outputs = []
    for index, sequence in enumerate(sequences):
        sequence.write(a.layer, k[index][None, :, None], v[index][None, :, None])
        keys, values = (t[0] for t in sequence.read(a.layer, sequence.length + 1))
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        probabilities = _softmax((keys @ q[index][:, :, None])[..., 0], a.view)
        outputs.append((probabilities[:, None] @ values)[:, 0].flatten())
    return project(a.o, torch.stack(outputs))


def _attend_latent(
    a: LatentAttention, rows: Tensor, positions: Tensor, sequences: Sequence[SequenceKV]
) -> Tensor:
    queries = rows
    if a.q_a is not None and a.q_a_norm is not None:
        queries = apply_norm(a.q_a_norm, project(a.q_a, rows))
    plain, turned = (
        project(a.q, queries).unflatten(-1, (a.heads, -1)).split([a.plain_dim, a.rotation.size], -1)
    )
    turned = rotate(a.rotation, turned, positions)
    latent, key = project(a.kv_a, rows).split([a.kv_b.shape[-1], a.rotation.size], -1)
    latent = apply_norm(a.kv_norm, latent)
    key = rotate(a.rotation, key[:, None], positions)[:, 0]
    inward = torch.einsum("bhp,hpr->bhr", plain, a.kv_b[:, : a.plain_dim])
    outputs = []
    for index, sequence in enumerate(sequences):
        sequence.write(a.layer, latent[index][None, None, None], key[index][None, None, None])
        latents, keys = (t[0, 0] for t in sequence.read(a.layer, sequence.length + 1))
        scores = inward[index] @ latents.T + turned[index] @ keys.T
        outputs.append(_softmax(scores, a.view) @ latents)
    values = torch.einsum("bhr,hvr->bhv", torch.stack(outputs), a.kv_b[:, a.plain_dim :])
    return project(a.o, values.flatten(1))


def _turned(
    rows: Tensor, heads: int, norm: HeadNorm | None, a: Attention, positions: Tensor
) -> Tensor:
    """Norm and rotation of ``(B, heads * D)`` in their order: ``(B, heads, D)``."""
    if norm is not None and not norm.per_head:
        rows = apply_norm(norm.norm, rows)
    states = rows.unflatten(-1, (heads, a.head_dim))
    per_head = norm is not None and norm.per_head
    if norm is not None and per_head and not norm.after_rotation:
        states = apply_norm(norm.norm, states)
    if a.rotation is not None:
        states = rotate(a.rotation, states, positions)
    if norm is not None and per_head and norm.after_rotation:
        states = apply_norm(norm.norm, states)
    return states


def _softmax(scores: Tensor, view: View) -> Tensor:
    """Probabilities ``(Q, L)`` of one sequence's keys, the newest last."""
    scores = scores * view.scale
    if view.softcap is not None:
        scores = view.softcap * torch.tanh(scores / view.softcap)
    keys = scores.shape[-1]
    if view.window is not None and keys > view.window:
        scores[..., : keys - view.window] = -float("inf")
    if view.sinks is not None:
        scores = torch.cat([scores, view.sinks[:, None]], -1)
    return scores.softmax(-1)[..., :keys]


def _feed(feed: FeedForward | Experts, rows: Tensor, visit: Visitor) -> Tensor:
    if isinstance(feed, FeedForward):
        inner = ACTIVATIONS[feed.activation](project(feed.gate, rows)) * project(feed.up, rows)
        return project(feed.down, inner)
    router = feed.router
    if isinstance(router, OwnRouter):
        routing = Routing.from_router(*router.forward(rows), feed.num_experts)
    else:
        routing = route(router, rows)
    output = visit(feed.layer, rows, routing) * feed.scale
    if feed.shared is not None:
        shared = _feed(feed.shared, rows, visit)
        if feed.shared_gate is not None:
            shared = shared * torch.sigmoid(project(feed.shared_gate, rows))
        output = output + shared
    return output
