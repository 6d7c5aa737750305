"""The layers that benchmarks/kernels.py times, made of random codes,"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels import ExpertWeights, PlaneMatrix, QuantizedExperts
from kernels.planes import PLANE_BITS, PlaneLayout

GROUP_SIZE = 64


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    experts: int
    width: int
    top_k: int
    copies: int  # layers that take turns


SIZES = (
    Size("2B layer", hidden=1024, experts=64, width=512, top_k=8, copies=3),
    Size("30B layer", hidden=2048, experts=128, width=768, top_k=8, copies=1),
)


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 2**62, (-(-size // 8),)).view(torch.uint8)[:size]


def random_scales(size: int) -> Tensor:
    return (torch.rand(size) * 1e-3).half()


def random_experts(size: Size) -> QuantizedExperts:
    """A layer of random codes with all their planes."""
    first = PlaneLayout(size.width, size.hidden, GROUP_SIZE)
    second = PlaneLayout(size.hidden, size.width, GROUP_SIZE)
    planes, scales = [], []
    for _ in range(size.experts):
        sizes = (2 * first.plane_bytes(p) + second.plane_bytes(p) for p in range(len(PLANE_BITS)))
        planes.append(tuple(random_bytes(count) for count in sizes))
        scales.append(random_scales(2 * first.num_scales + second.num_scales))
    return QuantizedExperts(first, 2, second, tuple(planes), tuple(scales), silu_gate)


def whole_experts(size: Size, dtype: torch.dtype) -> ExpertWeights:
    gate_up = torch.empty(size.experts, 2 * size.width, size.hidden, dtype=dtype)
    down = torch.empty(size.experts, size.hidden, size.width, dtype=dtype)
    return ExpertWeights(gate_up.uniform_(-0.05, 0.05), down.uniform_(-0.05, 0.05), silu_gate)


def random_matrix(size: int) -> PlaneMatrix:
    """A square matrix of random codes with all its planes."""
    layout = PlaneLayout(size, size, GROUP_SIZE)
    planes = tuple(random_bytes(layout.plane_bytes(p)) for p in range(len(PLANE_BITS)))
    return PlaneMatrix(layout, planes, random_scales(layout.num_scales))
