"""A decode step through a described model, written once, and its slow and obvious form.

`walk` computes the layers with the `StepOperations` that it is given. It stops where routed experts
are needed and goes on with their rows, so its caller decides what runs them. `reference_step` walks
in plain torch, which the other steps must equal; `moe.decode.cuda_graph` records a walk on a GPU.
Legend: B rows, each one new token (a sequence may have several, at successive positions), H hidden,
Q query heads, N key/value heads, D head size, R latent size, V vocabulary, L keys.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe.decode.step import RoutedExperts, finish_step
from moe.describe.description import (
    Attention,
    Description,
    Experts,
    FeedForward,
    HeadNorm,
    LatentAttention,
    Layer,
    Norm,
    OwnRouter,
    Projection,
    Rotation,
    View,
)
from moe.describe.parts import ACTIVATIONS, apply_norm, project, rotate
from moe.describe.routers import route
from moe.network.kv_cache import KVCache, Work
from routing import Routing


@dataclass(frozen=True)
class Halt:
    """Rows ``(B, H)`` float32 that wait for the routed experts of an MoE layer."""

    layer: int
    rows: Tensor
    routing: Routing


Walk = Generator[Halt, Tensor, Tensor]
"""Takes ``(B, H)`` rows for each `Halt`; returns ``(B, V)`` float32 logits."""


class StepOperations(Protocol):
    """The operations of a walk; all rows in and out are float32."""

    def project(self, projection: Projection, rows: Tensor) -> Tensor: ...

    def turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        """Rotate ``(B, heads, D)`` to the rows' positions."""

    def attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values; ``(B, Q, D_v)`` attention over what each row sees."""

    def attend_latent(
        self, a: LatentAttention, inward: Tensor, turned: Tensor, latent: Tensor, key: Tensor
    ) -> Tensor:
        """The same with queries ``(B, Q, R)`` and rotated ones: ``(B, Q, R)`` sums of latents."""


def walk(
    description: Description,
    tokens: Tensor,
    means: StepOperations,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Walk:
    """Read ``(B,)`` tokens.

    Args:
        watch: called with each layer's index and output.
    """
    x = description.embedding(tokens).float() * description.embedding_scale
    for index, layer in enumerate(description.layers):
        x = yield from _layer(layer, x, means)
        if watch is not None:
            watch(index, x)
    rows = means.project(description.head, apply_norm(description.norm, x))
    logits = rows * description.logit_scale
    cap = description.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _layer(layer: Layer, x: Tensor, means: StepOperations) -> Walk:
    attend = _latent if isinstance(layer.attention, LatentAttention) else _grouped
    rows = attend(layer.attention, _normed(layer.attention_norm, x), means)  # type: ignore[arg-type]
    x = x + layer.attention_scale * _normed(layer.attention_post_norm, rows)
    rows = yield from _feed(layer.feed, _normed(layer.feed_norm, x), means)
    return x + layer.feed_scale * _normed(layer.feed_post_norm, rows)


def _grouped(a: Attention, rows: Tensor, means: StepOperations) -> Tensor:
    q = _turned(means.project(a.q, rows), a.heads, a.q_norm, a, means)
    k = _turned(means.project(a.k, rows), a.kv_heads, a.k_norm, a, means)
    v = means.project(a.v, rows).unflatten(-1, (a.kv_heads, a.value_dim))
    return means.project(a.o, means.attend(a, q, k, v).flatten(1))


def _latent(a: LatentAttention, rows: Tensor, means: StepOperations) -> Tensor:
    queries = rows
    if a.q_a is not None and a.q_a_norm is not None:
        queries = apply_norm(a.q_a_norm, means.project(a.q_a, rows))
    plain, turned = (
        means.project(a.q, queries)
        .unflatten(-1, (a.heads, -1))
        .split([a.plain_dim, a.rotation.size], -1)
    )
    latent, key = means.project(a.kv_a, rows).split([a.kv_b.shape[-1], a.rotation.size], -1)
    latent = apply_norm(a.kv_norm, latent)
    turned, key = means.turn(a.rotation, turned), means.turn(a.rotation, key[:, None])[:, 0]
    inward = torch.einsum("bhp,hpr->bhr", plain.to(a.kv_b.dtype), a.kv_b[:, : a.plain_dim])
    sums = means.attend_latent(a, inward.float(), turned, latent, key)
    values = torch.einsum("bhr,hvr->bhv", sums.to(a.kv_b.dtype), a.kv_b[:, a.plain_dim :])
    return means.project(a.o, values.float().flatten(1))


def _turned(
    rows: Tensor, heads: int, norm: HeadNorm | None, a: Attention, means: StepOperations
) -> Tensor:
    """Norm and rotation of ``(B, heads * D)`` in their order: ``(B, heads, D)``."""
    if norm is not None and not norm.per_head:
        rows = apply_norm(norm.norm, rows)
    states = rows.unflatten(-1, (heads, a.head_dim))
    per_head = norm is not None and norm.per_head
    if norm is not None and per_head and not norm.after_rotation:
        states = apply_norm(norm.norm, states)
    if a.rotation is not None:
        states = means.turn(a.rotation, states)
    if norm is not None and per_head and norm.after_rotation:
        states = apply_norm(norm.norm, states)
    return states


def _feed(feed: FeedForward | Experts, rows: Tensor, means: StepOperations) -> Walk:
    if isinstance(feed, FeedForward):
        return _gated(feed, rows, means)
    router = feed.router
    if isinstance(router, OwnRouter):
        routing = Routing.from_router(*router.forward(rows), feed.num_experts)
    else:
        routing = route(router, rows)
    routed = yield Halt(feed.layer, rows, routing)
    output = routed.float() * feed.scale
    if feed.shared is not None:
        shared = _gated(feed.shared, rows, means)
        if feed.shared_gate is not None:
            shared = shared * torch.sigmoid(means.project(feed.shared_gate, rows))
        output = output + shared
    return output


def _gated(feed: FeedForward, rows: Tensor, means: StepOperations) -> Tensor:
    gate, up = means.project(feed.gate, rows), means.project(feed.up, rows)
    return means.project(feed.down, ACTIVATIONS[feed.activation](gate) * up)


def _normed(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else apply_norm(norm, rows)


def reference_step(
    description: Description,
    work: Sequence[Work],
    routed: RoutedExperts,
    watch: Callable[[int, Tensor], None] | None = None,
) -> list[Tensor]:
    """Logits as of `moe.network.backbone.Backbone.lanes`; the sequences grow by the tokens read.

    Args:
        watch: called with each layer's index and output.
    """
    tokens = torch.tensor([token for item in work for token in item.token_ids])
    steps, answer = walk(description, tokens, _Plain(work), watch), None
    while True:
        try:
            halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
        except StopIteration as end:
            return finish_step(work, end.value)
        answer = routed(halt.layer, halt.rows, halt.routing)


class _Plain:
    """Row by row and key by key; see `moe.decode.reference.Means`."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        ends = [(item.cache.length, len(item.token_ids)) for item in work]
        self._positions = torch.cat([torch.arange(at, at + count) for at, count in ends])

    def project(self, projection: Projection, rows: Tensor) -> Tensor:
        return project(projection, rows)

    def turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        rotation.table.reserve(int(self._positions.max()) + 1)
        table, at = rotation.table, self._positions
        return rotate(rotation, heads, table.cos[at], table.sin[at])

    def attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = a.heads // a.kv_heads
        outputs = []
        for row, (keys, values) in zip(q, self._seen(a.layer, k, v), strict=True):
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            probabilities = _softmax((keys @ row[:, :, None])[..., 0], a.view)
            outputs.append((probabilities[:, None] @ values)[:, 0])
        return torch.stack(outputs)

    def attend_latent(
        self, a: LatentAttention, inward: Tensor, turned: Tensor, latent: Tensor, key: Tensor
    ) -> Tensor:
        outputs = []
        stored = self._seen(a.layer, latent[:, None], key[:, None])
        for row, beside, ((latents,), (keys,)) in zip(inward, turned, stored, strict=True):
            scores = row @ latents.T + beside @ keys.T
            outputs.append(_softmax(scores, a.view) @ latents)
        return torch.stack(outputs)

    def _seen(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Store rows ``(B, N, D)``; yield the ``(N, L, D)`` keys and values that each row sees."""
        sizes = [len(item.token_ids) for item in self._work]
        for item, k, v in zip(self._work, keys.split(sizes), values.split(sizes), strict=True):
            cache = item.cache
            assert isinstance(cache, KVCache)
            cache.write(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            for row in range(len(k)):
                seen_keys, seen_values = cache.read(layer, cache.length + row + 1)
                yield seen_keys[0], seen_values[0]


def _softmax(scores: Tensor, view: View) -> Tensor:
    """Probabilities ``(Q, L)`` of one row's keys, the newest last."""
    scores = scores * view.scale
    if view.softcap is not None:
        scores = view.softcap * torch.tanh(scores / view.softcap)
    keys = scores.shape[-1]
    scores[..., : view.first_key(keys)] = -float("inf")
    if view.sinks is not None:
        scores = torch.cat([scores, view.sinks[:, None]], -1)
    return scores.softmax(-1)[..., :keys]
