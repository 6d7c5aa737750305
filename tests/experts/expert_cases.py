"""Experts of any shape, for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels import ExpertWeights


def concatenated(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return silu(gate) * up


def interleaved(rows: Tensor) -> Tensor:
    return (rows[..., 1::2].clamp(-7, 7) + 1) * silu(rows[..., 0::2].clamp(max=7))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "concatenated": concatenated,
    "interleaved": interleaved,
    "plain": silu,
}


def some_experts(
    activation: str = "concatenated",
    *,
    count: int = 3,
    width: int = 20,
    hidden: int = 40,
    biases: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = width if activation == "plain" else 2 * width
    return ExpertWeights(
        gate_up_EGH=normal(count, rows, hidden),
        down_EHF=normal(count, hidden, width),
        activation=ACTIVATIONS[activation],
        gate_up_bias_EG=normal(count, rows) if biases else None,
        down_bias_EH=normal(count, hidden) if biases else None,
    )


def on_meta(experts: ExpertWeights) -> ExpertWeights:
    """Its shapes and its activation."""
    return ExpertWeights(
        experts.gate_up_EGH.to("meta"), experts.down_EHF.to("meta"), experts.activation
    )
