"""A decoder model as values that a compiled step can run.

`moe.describe.decoder` fills a description from the modules' own attributes and one observed pass of
transformers' forward. It is used only if steps by it reproduce that forward (`moe.decode.proof`).
No part knows an architecture's name.
Legend: H hidden, Q query heads, N key/value heads, D head size, E experts, R latent size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernels import PlaneMatrix
from moe.kv.layout import Shape
from routing.routers import RouterRule

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Style = Literal["half", "pairs", "pairs_to_halves"]
_FIRST_POSITIONS = 1024


class NotDescribed(Exception):
    """A module does something that a description cannot express; the message says what."""


@dataclass(frozen=True)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight (+ bias)``; the mean is taken off first if centered."""

    weight: Tensor  # (H,) float32, any constant that the module adds to it included
    bias: Tensor | None
    eps: float
    centered: bool
    leaf: nn.Module | None = None  # the module that was described


@dataclass(frozen=True)
class Projection:
    """``x W^T + bias``, the weight dense or as bit planes."""

    weight: Tensor | PlaneMatrix  # (N, K); shares the leaf's memory
    bias: Tensor | None  # (N,) float32
    leaf: nn.Module  # the module that was described

    @property
    def rows(self) -> int:
        weight = self.weight
        return weight.shape[0] if isinstance(weight, Tensor) else weight.layout.rows


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries or keys."""

    norm: Norm
    per_head: bool  # or of all heads at once
    after_rotation: bool = False


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of ``size`` dimensions of a head from ``begin`` on.

    Rotated together are (i, i + size/2) by ``half``, (2i, 2i + 1) by ``pairs``; ``pairs_to_halves``
    rotates pairs and leaves them as halves.
    """

    style: Style
    begin: int
    size: int
    table: RotaryTable


@dataclass(frozen=True)
class View:
    """``softmax(softcap(q k scale))`` over the visible keys."""

    scale: float
    window: int | None = None  # number of last keys that are visible; None: all
    chunk: int | None = None  # only keys of the query's own chunk of so many positions are visible
    softcap: float | None = None
    sinks: Tensor | None = None  # (Q,) float32

    def first_key(self, length: int) -> int:
        """The first key that the last of so many positions sees."""
        if self.chunk is not None:
            return (length - 1) // self.chunk * self.chunk
        return 0 if self.window is None else max(0, length - self.window)

    @property
    def span(self) -> int:
        """For kernels: the window, minus the size of a chunk, or 0 if all keys are visible."""
        return -self.chunk if self.chunk is not None else self.window or 0


@dataclass(frozen=True)
class Attention:
    """Grouped queries; the cache holds rotated keys and values of each head."""

    layer: int  # index of its cache
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    rotation: Rotation | None
    view: View
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    joined: Tensor | PlaneMatrix | None = None  # q, k and v, where they lie one behind the other

    @property
    def cache_shape(self) -> Shape:
        """The shape of the rows that it keeps."""
        return Shape(self.kv_heads, self.head_dim, self.value_dim)


@dataclass(frozen=True)
class LatentAttention:
    """Keys and values of all heads from one latent row; cached are latents and rotated keys."""

    layer: int
    q_a: Projection | None  # (R_q, H), before q; None: q reads the hidden state
    q_a_norm: Norm | None
    q: Projection  # (Q * (plain + rotated), H or R_q)
    kv_a: Projection  # (R + rotated, H)
    kv_norm: Norm
    kv_b: Tensor  # (Q, plain + value, R) float32, of its leaf; float16 in a compiled step's
    kv_b_leaf: nn.Module
    o: Projection
    rotation: Rotation
    view: View
    heads: int
    plain_dim: int
    value_dim: int
    joined: Tensor | PlaneMatrix | None = None  # q_a (or q) and kv_a, likewise

    @property
    def cache_shape(self) -> Shape:
        """The shape of the rows that it keeps."""
        return Shape(1, self.kv_b.shape[-1], self.rotation.size)


@dataclass(frozen=True)
class FeedForward:
    """``down(activation(gate(x)) * up(x))``."""

    gate: Projection
    up: Projection
    down: Projection
    activation: Activation
    joined: Tensor | PlaneMatrix | None = None  # gate and up, likewise


@dataclass(frozen=True)
class Router:
    """A rule, and the matrix whose logits it chooses by."""

    weight: Projection
    rule: RouterRule


@dataclass(frozen=True)
class OwnRouter:
    """A router whose rule is not known: the architecture's own module, called in each step."""

    forward: Callable[[Tensor], tuple[Tensor, Tensor]]  # (B, H) -> (B, K) ids and weights


@dataclass(frozen=True)
class Experts:
    """Routed experts, which the MoE layer runs, and the shared expert beside them."""

    layer: int  # counted over MoE layers
    num_experts: int
    router: Router | OwnRouter
    shared: FeedForward | None
    shared_gate: Projection | None  # (1, H): its sigmoid weights the shared expert
    scale: float  # of the routed experts' sum


@dataclass(frozen=True)
class Layer:
    """``x += a post(attention(pre(x)))``, ``x += f post(feed(pre(x)))``; norms may be absent."""

    attention: Attention | LatentAttention
    feed: FeedForward | Experts
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    feed_norm: Norm | None
    feed_post_norm: Norm | None
    attention_scale: float
    feed_scale: float


@dataclass(frozen=True)
class Description:
    """A whole model."""

    embedding: nn.Module
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection
    logit_scale: float
    logit_softcap: float | None


class RotaryTable:
    """Cosines and sines by position, made by a model's own rotary module; grows by doubling.

    Former tables stay in memory, as compiled records may hold their addresses.

    Args:
        rotate: what the module returns for ``(1, P)`` int64 positions.
        of_length: a table depends on its longest position. Then each position is that of a sequence
            which ends there, as in a decode step.

    Attributes:
        of_length: as given.
    """

    def __init__(self, rotate: Callable[[Tensor], Any], *, of_length: bool = False) -> None:
        self.of_length = of_length
        self._rotate = partial(_one_by_one, rotate) if of_length else rotate
        self._before: list[tuple[Tensor, Tensor]] = []
        self.cos, self.sin = cos_sin(self._rotate(torch.arange(_FIRST_POSITIONS)[None]))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of ``(T,)`` positions; the tables do not grow for far ones."""
        if int(positions.max()) < len(self.cos):
            return self.cos[positions], self.sin[positions]
        return cos_sin(self._rotate(positions[None]))

    def reserve(self, positions: int) -> None:
        """Make the tables hold at least this many positions."""
        have = self.cos.shape[0]
        if positions <= have:
            return
        more = torch.arange(have, max(positions, 2 * have))[None]
        cos, sin = cos_sin(self._rotate(more))
        self._before.append((self.cos, self.sin))
        self.cos, self.sin = torch.cat([self.cos, cos]), torch.cat([self.sin, sin])


def _one_by_one(rotate: Callable[[Tensor], Any], positions: Tensor) -> Any:
    """Return the results of a rotary module for each position alone, one after the other."""
    made = [rotate(position) for position in positions.split(1, dim=1)]
    if isinstance(made[0], Tensor):
        return torch.cat(made, -2)
    return tuple(torch.cat(parts, -2) for parts in zip(*made, strict=True))


def cos_sin(output: Any) -> tuple[Tensor, Tensor]:
    """``(P, size / 2)`` float32 cosines and sines of what a rotary module returned for P positions.

    Modules return complex numbers, or cosines and sines of each angle once or twice.
    Raises ValueError for anything else.
    """
    if isinstance(output, Tensor) and output.is_complex():
        table = output.reshape(-1, output.shape[-1])
        return table.real.float().contiguous(), table.imag.float().contiguous()
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError("the rotary module returns neither complex numbers nor a pair")
    cos, sin = (part.reshape(-1, part.shape[-1]).float() for part in output)
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()
    if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        return cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
    return cos.contiguous(), sin.contiguous()
