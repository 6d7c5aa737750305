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
from functools import cache, partial
from typing import NamedTuple, Protocol

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
    Norm,
    OwnRouter,
    Projection,
    Rotation,
    View,
)
from moe.describe.parts import ACTIVATIONS, apply_norm, project, rotate
from moe.describe.routers import route
from moe.network.packed_pass import Work
from routing import Routing


@dataclass(frozen=True)
class Halt:
    """Rows that wait for the routed experts of an MoE layer.

    Attributes:
        beside: computes what the shared expert makes of them, once, if somebody wants it before
            the routed experts are there; None where there is no shared expert.
    """

    layer: int
    rows: Normed
    routing: Routing
    beside: Callable[[], object] | None


Walk = Generator[Halt, Tensor, Tensor]
"""Takes ``(B, H)`` rows for each `Halt`; returns float32 logits, ``(B, V)`` or of some rows."""


class Normed(NamedTuple):
    """Rows ``(B, H)`` behind a norm: in float32, and as projections read them."""

    exact: Tensor
    rounded: Tensor


class StepOperations(Protocol):
    """The operations of a walk. Rows come and go in any float dtype; the residual stream is
    float32."""

    def project(self, projection: Projection, rows: Normed | Tensor) -> Tensor: ...

    def add(
        self, x: Tensor, rows: Tensor | None, scale: float, post: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Normed]:
        """``x + scale * post(rows)``, which may take the place of x, and the norm of it."""

    def attend(self, a: Attention, rows: Normed) -> Tensor:
        """Attention, with its projections; keys and values are stored."""

    def attend_latent(self, a: LatentAttention, rows: Normed) -> Tensor:
        """Latent attention, with its projections; latents are stored."""

    def feed(self, feed: FeedForward, rows: Normed) -> Tensor:
        """A dense feed-forward or a shared expert."""

    def route(self, feed: Experts, rows: Normed) -> Routing:
        """The experts that each row visits."""

    def add_shared(
        self, routed: Tensor, scale: float, shared: Tensor, gate: Tensor | None
    ) -> Tensor:
        """``scale * routed + sigmoid(gate) * shared``, in float32.

        Args:
            gate: ``(B, 1)``; None: the shared expert is added as it is.
        """

    def logits(self, head: Projection, rows: Normed) -> Tensor:
        """``(B, V)`` float32 of the head, of which nobody else keeps a copy."""


def walk(
    description: Description,
    tokens: Tensor,
    means: StepOperations,
    watch: Callable[[int, Tensor], None] | None = None,
    last: Callable[[Normed], Normed] | None = None,
) -> Walk:
    """Read ``(B,)`` tokens.

    Args:
        watch: called with each layer's index and output.
        last: takes the rows behind the last norm, and returns those whose logits are wanted.
    """
    x = scaled(description.embedding(tokens).float(), description.embedding_scale)
    rows, scale, post = None, 1.0, None  # what the layer before leaves to be added
    for index, layer in enumerate(description.layers):
        x, normed = means.add(x, rows, scale, post, layer.attention_norm)
        if watch is not None and index:
            watch(index - 1, x)
        a = layer.attention
        latent = isinstance(a, LatentAttention)
        rows = means.attend_latent(a, normed) if latent else means.attend(a, normed)  # type: ignore[arg-type]
        attended = rows, layer.attention_scale, layer.attention_post_norm
        x, normed = means.add(x, *attended, layer.feed_norm)
        rows = yield from _feed(layer.feed, normed, means)
        scale, post = layer.feed_scale, layer.feed_post_norm
    x, normed = means.add(x, rows, scale, post, description.norm)
    if watch is not None:
        watch(len(description.layers) - 1, x)
    if last is not None:
        normed = last(normed)
    logits = means.logits(description.head, normed)  # changed in place: they are large
    if description.logit_scale != 1.0:
        logits *= description.logit_scale
    cap = description.logit_softcap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """``scale * rows``; nothing runs where that changes nothing."""
    return rows if scale == 1.0 else rows * scale


def _feed(feed: FeedForward | Experts, rows: Normed, means: StepOperations) -> Walk:
    if isinstance(feed, FeedForward):
        return means.feed(feed, rows)
    routing = means.route(feed, rows)
    shared = (
        None if feed.shared is None else cache(partial(_shared, feed, feed.shared, rows, means))
    )
    routed = yield Halt(feed.layer, rows, routing, shared)
    if shared is None:
        return scaled(routed, feed.scale)
    return means.add_shared(routed, feed.scale, *shared())


def _shared(
    feed: Experts, expert: FeedForward, rows: Normed, means: StepOperations
) -> tuple[Tensor, Tensor | None]:
    """Return the shared expert's output for the rows, and its gate's logits."""
    gate = feed.shared_gate
    return means.feed(expert, rows), None if gate is None else means.project(gate, rows)


def chosen(feed: Experts, rows: Tensor) -> Routing:
    """The experts that float32 rows ``(B, H)`` visit."""
    router = feed.router
    if isinstance(router, OwnRouter):
        return Routing.from_router(*router.forward(rows), feed.num_experts)
    return route(router, rows)


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
        answer = routed(halt.layer, halt.rows.exact, halt.routing)


class _Plain:
    """Row by row and key by key in float32; see `StepOperations`."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        ends = [(item.cache.length, len(item.token_ids)) for item in work]
        self._positions = torch.cat([torch.arange(at, at + count) for at, count in ends])

    def project(self, projection: Projection, rows: Normed | Tensor) -> Tensor:
        return project(projection, rows.exact if isinstance(rows, Normed) else rows)

    def add(
        self, x: Tensor, rows: Tensor | None, scale: float, post: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Normed]:
        x = x if rows is None else x + scale * _normed(post, rows)
        normed = _normed(norm, x)
        return x, Normed(normed, normed)

    def feed(self, feed: FeedForward, rows: Normed) -> Tensor:
        gate, up = self.project(feed.gate, rows), self.project(feed.up, rows)
        return self.project(feed.down, ACTIVATIONS[feed.activation](gate) * up)

    def route(self, feed: Experts, rows: Normed) -> Routing:
        return chosen(feed, rows.exact)

    def add_shared(
        self, routed: Tensor, scale: float, shared: Tensor, gate: Tensor | None
    ) -> Tensor:
        weighted = shared if gate is None else shared * torch.sigmoid(gate)
        return scaled(routed, scale) + weighted

    def logits(self, head: Projection, rows: Normed) -> Tensor:
        return self.project(head, rows).float()

    def attend(self, a: Attention, rows: Normed) -> Tensor:
        q = self._turned(self.project(a.q, rows), a.heads, a.q_norm, a)
        k = self._turned(self.project(a.k, rows), a.kv_heads, a.k_norm, a)
        v = self.project(a.v, rows).unflatten(-1, (a.kv_heads, a.value_dim))
        group = a.heads // a.kv_heads
        outputs = []
        seen = self._seen(a.layer, k, v, None if a.view.span else q)
        for row, (keys, values, mask) in zip(q, seen, strict=True):
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            if mask is not None:
                mask = mask.repeat_interleave(group, 0)
            probabilities = _softmax((keys @ row[:, :, None])[..., 0], a.view, mask)
            outputs.append((probabilities[:, None] @ values)[:, 0])
        return self.project(a.o, torch.stack(outputs).flatten(1))

    def attend_latent(self, a: LatentAttention, rows: Normed) -> Tensor:
        queries: Normed | Tensor = rows
        if a.q_a is not None and a.q_a_norm is not None:
            queries = apply_norm(a.q_a_norm, self.project(a.q_a, rows))
        plain, turned = (
            self.project(a.q, queries)
            .unflatten(-1, (a.heads, -1))
            .split([a.plain_dim, a.rotation.size], -1)
        )
        latent, key = self.project(a.kv_a, rows).split([a.kv_b.shape[-1], a.rotation.size], -1)
        latent = apply_norm(a.kv_norm, latent)
        turned, key = self._turn(a.rotation, turned), self._turn(a.rotation, key[:, None])[:, 0]
        expansion = a.kv_b.float()
        inward = torch.einsum("bhp,hpr->bhr", plain, expansion[:, : a.plain_dim])
        sums = []
        stored = self._seen(a.layer, latent[:, None], key[:, None])
        for row, beside, (latents_NLR, keys_NLT, _) in zip(inward, turned, stored, strict=True):
            (latents,), (keys,) = latents_NLR, keys_NLT
            scores = row @ latents.T + beside @ keys.T
            sums.append(_softmax(scores, a.view) @ latents)
        values = torch.einsum("bhr,hvr->bhv", torch.stack(sums), expansion[:, a.plain_dim :])
        return self.project(a.o, values.flatten(1))

    def _turned(self, rows: Tensor, heads: int, norm: HeadNorm | None, a: Attention) -> Tensor:
        """Norm and rotation of ``(B, heads * D)`` in their order: ``(B, heads, D)``."""
        if norm is not None and not norm.per_head:
            rows = apply_norm(norm.norm, rows)
        states = rows.unflatten(-1, (heads, a.head_dim))
        per_head = norm is not None and norm.per_head
        if norm is not None and per_head and not norm.after_rotation:
            states = apply_norm(norm.norm, states)
        if a.rotation is not None:
            states = self._turn(a.rotation, states)
        if norm is not None and per_head and norm.after_rotation:
            states = apply_norm(norm.norm, states)
        return states

    def _turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        rotation.table.reserve(int(self._positions.max()) + 1)
        table, at = rotation.table, self._positions
        return rotate(rotation, heads, table.cos[at], table.sin[at])

    def _seen(
        self, layer: int, keys: Tensor, values: Tensor, queries: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Store rows ``(B, N, D)``; yield the ``(N, L, D)`` keys and values up to each row, and
        which of them it sees, ``(N, L)`` bool; None: all.

        Args:
            queries: ``(B, Q, D)`` of a layer that sees all, where policies on keys hold.
        """
        sizes, first = [len(item.token_ids) for item in self._work], 0
        for item, k, v in zip(self._work, keys.split(sizes), values.split(sizes), strict=True):
            cache = item.cache.kv
            cache.write(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            for row in range(len(k)):
                own, mask = cache.read(layer, cache.length + row + 1), None
                if queries is not None:
                    mask = cache.seen_mask(layer, queries[None, first + row, :, None], own[0])
                yield own[0][0], own[1][0], mask
            first += len(k)


def _softmax(scores: Tensor, view: View, mask: Tensor | None = None) -> Tensor:
    """Probabilities ``(Q, L)`` of one row's keys, the newest last; of ``mask`` only."""
    scores = scores * view.scale
    if view.softcap is not None:
        scores = view.softcap * torch.tanh(scores / view.softcap)
    keys = scores.shape[-1]
    scores[..., : view.first_key(keys)] = -float("inf")
    if mask is not None:
        scores = scores.masked_fill(~mask, -float("inf"))
    if view.sinks is not None:
        scores = torch.cat([scores, view.sinks[:, None]], -1)
    return scores.softmax(-1)[..., :keys]
