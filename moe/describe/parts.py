"""Describes norms, projections, activations and rotations by trying them.

Attributes only suggest candidates (a weight, a small number that may be an epsilon); the one that
reproduces the module's output is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu

from experts.linear import QuantizedLinear
from kernels import PlaneMatrix, linear_forward
from moe.describe.description import (
    Activation,
    Norm,
    NotDescribed,
    Projection,
    RotaryTable,
    Rotation,
    Style,
)

_CLOSE = 2e-5
_ROUGHLY = 1e-4  # for sums in another order
_ROWS = 6

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
}


def close(actual: Tensor, expected: Tensor, tolerance: float = _CLOSE) -> bool:
    """Return whether two tensors of equal count agree, relative to the largest expected element."""
    if actual.numel() != expected.numel():
        return False
    a, b = actual.float().reshape(-1), expected.float().reshape(-1)
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same order, whatever their shapes."""
    return actual.numel() == expected.numel() and torch.equal(
        actual.reshape(-1), expected.reshape(-1)
    )


def child_of(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((child for child in found if isinstance(child, nn.Module)), None)


def describe_norm(module: nn.Module, size: int) -> Norm:
    """The norm that a module computes; constants (``1 + weight``) are folded into the weight."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-4, 1, _ROWS)[:, None]  # small rows, so that epsilon shows
    rows = (torch.randn(_ROWS, size, generator=generator) + 0.3) * scales
    own = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    expected = module(rows)
    for eps in _numbers(module):
        for centered in (False, True):
            plain = _normed(rows, eps, centered)
            for weight in _norm_weights(own, size):
                actual = plain * weight if bias is None else plain * weight + bias.float()
                if _rows_close(actual, expected):
                    kept = None if bias is None else bias.detach().float().clone()
                    return Norm(weight.clone(), kept, eps, centered, module)
    raise NotDescribed(f"{type(module).__name__} is no norm that is known here")


def apply_norm(norm: Norm, rows: Tensor) -> Tensor:
    """``(..., H)`` float32."""
    shape = list(norm.weight.shape)
    if norm.centered:
        return layer_norm(rows, shape, norm.weight, norm.bias, norm.eps)
    normed = rms_norm(rows, shape, norm.weight, norm.eps)
    return normed if norm.bias is None else normed + norm.bias


def describe_projection(module: nn.Module) -> Projection:
    """A linear layer; a dense one is checked on random rows."""
    own = getattr(module, "bias", None)
    bias = None if own is None else own.detach().float().clone()
    if isinstance(module, QuantizedLinear):
        return Projection(replace(module.matrix, bias=None), bias, module)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise NotDescribed(f"{type(module).__name__} is no linear layer that is known here")
    probe = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
    output = module(probe.to(weight.dtype))
    if not isinstance(output, Tensor) or not close(
        linear(probe, weight.float(), bias), output, _ROUGHLY
    ):
        raise NotDescribed(f"{type(module).__name__} does more than multiply by its weight")
    return Projection(weight.detach(), bias, module)


def halves(both: Projection) -> tuple[Projection, Projection]:
    """Split a projection that is two, one after the other."""
    biases = (None, None) if both.bias is None else both.bias.chunk(2)
    if isinstance(both.weight, Tensor):
        weights: Sequence[Tensor | PlaneMatrix] = both.weight.chunk(2)
    else:
        weights = _plane_halves(both.weight)
    first, second = (replace(both, weight=w, bias=b) for w, b in zip(weights, biases, strict=True))
    return first, second


def project(projection: Projection, rows: Tensor) -> Tensor:
    """``(T, N)`` float32."""
    weight = projection.weight
    if isinstance(weight, Tensor):
        return linear(rows, weight.float(), projection.bias)
    output = linear_forward(rows, weight)
    return output if projection.bias is None else output + projection.bias


def describe_activation(gate: Tensor, up: Tensor, inner: Tensor) -> Activation:
    """The activation of observed rows: ``inner = activation(gate) * up``."""
    for name, function in ACTIVATIONS.items():
        if close(function(gate.float()) * up.float(), inner):
            return name
    raise NotDescribed("the feed-forward's activation is none that is known here")


def describe_rotation(
    before: Tensor, after: Tensor, table: RotaryTable, positions: Tensor
) -> Rotation | None:
    """The rotation that turned heads ``(T, heads, D)`` into ``after``; None if they are equal."""
    if same(before, after):
        return None
    size = 2 * table.cos.shape[1]
    cos, sin = table.at(positions)
    for begin in dict.fromkeys((0, before.shape[-1] - size)):
        for style in get_args(Style):
            rotation = Rotation(style, begin, size, table)
            if begin >= 0 and close(rotate(rotation, before, cos, sin), after):
                return rotation
    raise NotDescribed("queries or keys are changed by something other than a known rotation")


def rotate(rotation: Rotation, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``(T, heads, D)`` by ``(T, size / 2)`` cosines and sines."""
    begin, end = rotation.begin, rotation.begin + rotation.size
    cos, sin = cos[:, None], sin[:, None]
    part = heads[..., begin:end]
    if rotation.style == "half":
        first, second = part.chunk(2, -1)
    else:
        first, second = part[..., ::2], part[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    if rotation.style == "pairs":
        middle = torch.stack(turned, -1).flatten(-2)
    else:
        middle = torch.cat(turned, -1)
    return torch.cat([heads[..., :begin], middle, heads[..., end:]], -1)


def _plane_halves(matrix: PlaneMatrix) -> list[PlaneMatrix]:
    whole = matrix.layout
    layout = replace(whole, rows=whole.rows // 2)
    if 2 * layout.padded_rows != whole.rows:
        raise NotDescribed("two projections share blocks of bit planes")
    planes = zip(*(plane.chunk(2) for plane in matrix.planes), strict=True)
    scales = matrix.scales.chunk(2)
    return [PlaneMatrix(layout, p, s) for p, s in zip(planes, scales, strict=True)]


def _normed(rows: Tensor, eps: float, centered: bool) -> Tensor:
    rows = rows.float()
    if centered:
        rows = rows - rows.mean(-1, keepdim=True)
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)


def _norm_weights(own: Tensor | None, size: int) -> Iterator[Tensor]:
    if own is None:
        yield torch.ones(size)
    elif own.shape == (size,):
        yield own.detach().float()
        yield own.detach().float() + 1.0


def _numbers(module: nn.Module) -> list[float]:
    """Attributes that may be an epsilon."""
    own = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1]
    return list(dict.fromkeys([*own, torch.finfo(torch.float32).eps, 0.0]))


def _rows_close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and all(map(close, actual, expected))
