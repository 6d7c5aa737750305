"""torch's own linear operators on 8-bit, 4-bit and float weights, for benchmarks/kernels.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class Peer:
    """`weight(size, group_size)` makes a random square matrix, `run(x, weight)` multiplies."""

    weight: Callable[[int, int], Any]
    run: Callable[[Tensor, Any], Tensor]
    copies: int  # enough to exceed the caches
    most_tokens: int = 512


def _dynamic_weight(size: int, group_size: int) -> Any:
    scales, zeros = torch.full((size,), 0.01, dtype=torch.double), torch.zeros(size).long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao takes over
        whole = torch.quantize_per_channel(torch.randn(size, size), scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(whole, None)


def _dynamic(x: Tensor, weight: Any) -> Tensor:
    result: Tensor = torch.ops.quantized.linear_dynamic(x, weight, reduce_range=False)
    return result


def _int8_weight(size: int, group_size: int) -> Any:
    codes = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return codes, torch.rand(size).bfloat16()


def _int8(x: Tensor, weight: Any) -> Tensor:
    return torch._weight_int8pack_mm(x.bfloat16(), *weight)


def _int4_weight(size: int, group_size: int) -> Any:
    codes = torch.randint(0, 16, (size, size), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, group_size, torch.rand(size // group_size, size, 2).bfloat16()


def _int4(x: Tensor, weight: Any) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(x.bfloat16(), *weight)


# torch's weight-only operators are at their best on bf16 activations.
LINEAR_PEERS = {
    "torch dynamic int8": Peer(_dynamic_weight, _dynamic, copies=4),
    "torch int8": Peer(_int8_weight, _int8, copies=4, most_tokens=16),
    "torch int4": Peer(_int4_weight, _int4, copies=8, most_tokens=16),
    "torch fp32": Peer(lambda size, _: torch.randn(size, size), linear, copies=2),
    "torch bf16": Peer(
        lambda size, _: torch.randn(size, size).bfloat16(),
        lambda x, weight: linear(x.bfloat16(), weight),
        copies=3,
    ),
}
