"""The norm of an expert's output rows in the compiled kernels: recognised by trying it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.interface import Record, floats, numbers, pointers

# Explicit, because torch's defaults may be another dtype or device.
_PLACE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_LARGE, _SMALL = 1e4, 1e-6
"""Sizes of a row's elements: with the large ones an epsilon does not show, with the small ones it
does."""


class NormRecord(Record, struct="decode::Norm"):
    """Absent where the weight is null."""

    _fields_ = (*pointers("weight", "bias"), *floats("eps"), *numbers("centered"))


class PostNormRecord(Record, struct="PostNorm"):
    _fields_ = (("norm", NormRecord), *pointers("scale"))


@dataclass(frozen=True)
class PostNorm:
    """``x * scale / sqrt(mean((x * scale)^2) + eps) * weight`` of rows ``(S, H)``.

    Attributes:
        scale, weight: ``(H,)`` float32; without a scale it is 1.
    """

    scale: Tensor | None
    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        scaled = rows if self.scale is None else rows * self.scale
        return scaled * (scaled.square().mean(1, keepdim=True) + self.eps).rsqrt() * self.weight

    @property
    def record(self) -> PostNormRecord:
        """Addresses of the tensors, for C++."""
        scale = None if self.scale is None else self.scale.data_ptr()
        return PostNormRecord(NormRecord(self.weight.data_ptr(), None, self.eps, 0), scale)


@torch.no_grad()
def recognise_norm(function: Callable[[Tensor], Tensor], size: int) -> PostNorm | None:
    """The norm that ``function`` computes to 1e-5 of a row's largest element, or None.

    Rows of equal elements give the weights and the epsilon, supposing that it is one; random rows
    from small to huge then confirm them.

    Args:
        function: ``(S, size) -> (S, size)``.
    """
    levels = torch.tensor([_LARGE, _SMALL], **_PLACE)[:, None]
    made = function(levels.expand(2, size).contiguous())
    if made.shape != (2, size) or made.dtype != torch.float32:
        return None
    large, small = made
    shown = float((small.double().norm() / large.double().norm()).clamp(1e-12, 1.0))
    eps = _SMALL**2 * (shown**-2 - 1)
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(32, size, generator=generator, **_PLACE)
    rows = rows * torch.logspace(-5, 3, 32, **_PLACE)[:, None]
    actual, large = function(rows), large.clone()
    for norm in (PostNorm(None, large, eps), PostNorm(large, torch.ones_like(large), eps)):
        expected = norm(rows)
        if bool(((actual - expected).abs() <= 1e-5 * expected.abs().amax(1, True)).all()):
            return norm
    return None
