"""Random descriptions of every kind and awkward sizes, sequences for them, and cheap experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from moe.describe.attention import expansion_of
from moe.describe.description import (
    Activation,
    Attention,
    Description,
    Experts,
    FeedForward,
    HeadNorm,
    LatentAttention,
    Layer,
    Norm,
    Projection,
    RotaryTable,
    Rotation,
    Router,
    Style,
    View,
)
from moe.describe.parts import describe_projection
from moe.kv.cache import KVCache
from routing import Routing
from routing.routers import RouterRule

VOCABULARY = 50


class Maker:
    """Random parts of a description.

    Attributes:
        most_heads: of latent attention, and of a head of keys.
    """

    most_heads = 11, 6

    def __init__(self, draw: st.DataObject, hidden: int, *, whole: bool = False) -> None:
        self.draw, self.hidden, self.dense = draw.draw, hidden, 0
        self.bits = None if whole else self.draw(st.sampled_from([None, None, 8, 4]))
        self.dtype = self.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))

    def projection(self, rows: int, columns: int, *, high: bool = False) -> Projection:
        bias = self.draw(st.booleans())
        linear = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
        nn.init.normal_(linear.weight, std=columns**-0.5)
        if self.bits is not None and not high:
            return describe_projection(QuantizedLinear.of(linear, 32, self.bits))
        weight = linear.weight if high else linear.weight.to(self.dtype)
        return Projection(weight, linear.bias, linear)

    def norm(self, size: int) -> Norm:
        centered = self.draw(st.booleans())
        bias = torch.randn(size) * 0.1 if centered else None
        return Norm(1 + 0.1 * torch.randn(size), bias, 1e-5, centered)

    def maybe_norm(self, size: int) -> Norm | None:
        return self.norm(size) if self.draw(st.booleans()) else None

    def rotation(self, size: int, within: int) -> Rotation:
        style = self.draw(st.sampled_from(get_args(Style)))
        return Rotation(style, self.draw(st.sampled_from([0, within - size])), size, table(size))

    def view(self, heads: int) -> View:
        window = self.draw(st.sampled_from([None, 1, 5, 600]))
        return View(
            scale=0.3,
            window=window,
            chunk=self.draw(st.sampled_from([None, 1, 5])) if not window else None,
            softcap=self.draw(st.sampled_from([None, 5.0])),
            sinks=torch.randn(heads) if self.draw(st.booleans()) else None,
        )

    def head_norm(self, heads: int, size: int, after: bool) -> HeadNorm | None:
        per_head = after or self.draw(st.booleans())
        if not self.draw(st.booleans()):
            return None
        return HeadNorm(self.norm(size if per_head else heads * size), per_head, after)

    def grouped(self, layer: int) -> Attention:
        kv_heads, group = (self.draw(st.integers(1, n)) for n in (3, self.most_heads[1]))
        size, value = self.draw(st.sampled_from([4, 8, 16, 20, 64])), self.draw(st.integers(1, 40))
        heads, after = kv_heads * group, self.draw(st.booleans())
        return Attention(
            layer=layer,
            q=self.projection(heads * size, self.hidden),
            k=self.projection(kv_heads * size, self.hidden),
            v=self.projection(kv_heads * value, self.hidden),
            o=self.projection(self.hidden, heads * value),
            q_norm=self.head_norm(heads, size, after),
            k_norm=self.head_norm(kv_heads, size, after),
            rotation=self.rotation(4, size) if self.draw(st.booleans()) else None,
            view=self.view(heads),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            value_dim=value,
        )

    def latent(self, layer: int) -> LatentAttention:
        heads, plain, value = (self.draw(st.integers(1, n)) for n in (self.most_heads[0], 20, 20))
        size, rotated, low = self.draw(st.integers(1, 40)), 8, self.draw(st.sampled_from([0, 12]))
        whole = nn.Linear(size, heads * (plain + value), bias=False).requires_grad_(False)
        leaf = whole if self.bits is None else QuantizedLinear.of(whole, 32, self.bits)
        return LatentAttention(
            layer=layer,
            q_a=self.projection(low, self.hidden) if low else None,
            q_a_norm=self.norm(low) if low else None,
            q=self.projection(heads * (plain + rotated), low or self.hidden),
            kv_a=self.projection(size + rotated, self.hidden),
            kv_norm=self.norm(size),
            kv_b=expansion_of(leaf, heads, plain + value, size),
            kv_b_leaf=leaf,
            o=self.projection(self.hidden, heads * value),
            rotation=self.rotation(rotated, rotated),
            view=self.view(heads),
            heads=heads,
            plain_dim=plain,
            value_dim=value,
        )

    def mlp(self) -> FeedForward:
        width = self.draw(st.integers(1, 70))
        gate, up = (self.projection(width, self.hidden) for _ in range(2))
        kind = self.draw(st.sampled_from(get_args(Activation)))
        return FeedForward(gate, up, self.projection(self.hidden, width), kind)

    def router(self) -> Router:
        experts = 12
        groups = self.draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
        mixer = self.draw(st.sampled_from([0.0, 0.0, 0.1]))
        weight = self.projection(experts, self.hidden, high=True)
        rule = RouterRule(
            self.draw(st.integers(1, 4)),
            "mixer" if mixer else self.draw(st.sampled_from(["softmax", "sigmoid"])),
            correction=0.3 * torch.randn(experts) if self.draw(st.booleans()) else None,
            groups=groups[0],
            groups_kept=groups[1],
            group_score=self.draw(st.sampled_from(["max", "top2"])),
            renormalise=self.draw(st.booleans()),
            scale=1.5,
            mixer_threshold=mixer,
        )
        return Router(weight, rule)

    def experts(self, layer: int, router: Router) -> Experts:
        shared = self.mlp() if self.draw(st.booleans()) else None
        gated = shared is not None and self.draw(st.booleans())
        gate = self.projection(1, self.hidden, high=True) if gated else None
        return Experts(layer, 12, router, shared, gate, self.draw(st.sampled_from([1.0, 0.7])))

    def layer(self, index: int, router: Router) -> Layer:
        dense = index == 0 and self.draw(st.booleans())
        self.dense += dense
        return Layer(
            attention=self.latent(index) if self.draw(st.booleans()) else self.grouped(index),
            feed=self.mlp() if dense else self.experts(index - self.dense, router),
            attention_norm=self.maybe_norm(self.hidden),
            attention_post_norm=self.maybe_norm(self.hidden),
            feed_norm=self.norm(self.hidden),
            feed_post_norm=self.maybe_norm(self.hidden),
            attention_scale=self.draw(st.sampled_from([1.0, 0.5])),
            feed_scale=self.draw(st.sampled_from([1.0, 0.5])),
        )

    def description(self, layers: int) -> Description:
        router = self.router()
        return Description(
            embedding=nn.Embedding(VOCABULARY, self.hidden).requires_grad_(False),
            embedding_scale=self.draw(st.sampled_from([1.0, 3.0])),
            layers=tuple(self.layer(index, router) for index in range(layers)),
            norm=self.norm(self.hidden),
            head=self.projection(VOCABULARY, self.hidden, high=True),
            logit_scale=self.draw(st.sampled_from([1.0, 0.25])),
            logit_softcap=self.draw(st.sampled_from([None, 10.0])),
        )


def table(size: int, *, of_length: bool = False) -> RotaryTable:
    frequencies = 10.0 ** -torch.arange(0, size // 2)

    def rotate(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] * frequencies
        return angles.cos(), angles.sin()

    return RotaryTable(rotate, of_length=of_length)


def routed(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
    routing.validate(12)
    return rows * routing.weights.sum(1, keepdim=True)


def filled(
    description: Description,
    lengths: Sequence[int],
    room: int,
    new: Callable[[int], KVCache] = KVCache,
) -> list[KVCache]:
    """Sequences with random caches.

    Args:
        new: makes the cache of a capacity.
    """
    sequences = []
    for length in lengths:
        sequence = new(length + room)
        for layer in description.layers:
            heads, *sizes = layer.attention.cache_shape
            keys, values = (torch.randn(1, heads, length, size) for size in sizes)
            sequence.write(layer.attention.layer, keys, values)
        sequence.length = length
        sequences.append(sequence)
    return sequences
