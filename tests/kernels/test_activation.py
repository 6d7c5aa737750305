"""Activations are recognised by trying them, with their numbers; everything else is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.cpu.activation import Activation, recognise

SILU, GELU_TANH, GELU_ERF, RELU, RELU_SQUARED, BENT = range(6)


def clamped(alpha: float, limit: float, offset: float) -> Callable[[Tensor], Tensor]:
    def gate(rows: Tensor) -> Tensor:
        gate, up = rows[:, ::2].clamp(max=limit), rows[:, 1::2].clamp(-limit, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)

    return gate


def halves(curve: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: curve(rows[:, :6]) * rows[:, 6:]


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numbers(found: Activation | None) -> tuple[float, ...]:
    assert found is not None
    return found.curve, round(found.slope, 4), round(found.limit, 4), found.offset


@pytest.mark.parametrize(
    ("curve", "index", "slope"),
    [
        (silu, SILU, 1.0),
        (lambda x: x * torch.sigmoid(1.702 * x), SILU, 1.702),
        (lambda x: gelu(x, approximate="tanh"), GELU_TANH, None),
        (new_gelu, GELU_TANH, None),
        (gelu, GELU_ERF, None),
        (torch.relu, RELU, None),
        (lambda x: torch.relu(x) ** 2, RELU_SQUARED, None),
    ],
)
def test_curves_are_known_with_a_gate_and_without(
    curve: Callable[[Tensor], Tensor], index: int, slope: float | None
) -> None:
    for found in (recognise(halves(curve), 6, parts=2), recognise(curve, 6, parts=1)):
        assert found is not None
        assert (found.curve, found.limit, found.offset) == (index, math.inf, 0.0)
        assert slope is None or found.slope == pytest.approx(slope)


@pytest.mark.parametrize("alpha", [1.0, 1.702])
@pytest.mark.parametrize("limit", [1.0, 7.0, math.inf])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_numbers_of_clamped_gates_are_found(alpha: float, limit: float, offset: float) -> None:
    found = recognise(clamped(alpha, limit, offset), 6, parts=2, interleaved=True)
    assert numbers(found) == (SILU, alpha, limit, offset)


@pytest.mark.parametrize("limit", [0.75, 2.0])
@pytest.mark.parametrize("curve", [silu, gelu])
def test_a_limit_of_the_curve_is_told_from_one_of_the_gate(
    limit: float, curve: Callable[[Tensor], Tensor]
) -> None:
    def function(rows: Tensor, late: bool) -> Tensor:
        gate, up = rows[:, :6], rows[:, 6:].clamp(-limit, limit)
        return (curve(gate).clamp(max=limit) if late else curve(gate.clamp(max=limit))) * up

    for late in (False, True):
        found = recognise(partial(function, late=late), 6, parts=2)
        assert found is not None
        assert (bool(found.late), round(found.limit, 4)) == (late, limit)


@pytest.mark.parametrize("slope", [1.0, 1.702])
@pytest.mark.parametrize("gate_limit", [0.75, 4.0])
@pytest.mark.parametrize("up_limit", [0.5, 25.0])
def test_the_numbers_of_bent_gates_are_found(
    slope: float, gate_limit: float, up_limit: float
) -> None:
    def function(rows: Tensor) -> Tensor:
        gate, up = rows[:, :6], rows[:, 6:]
        bent = gate_limit * torch.tanh(gate / gate_limit) * torch.sigmoid(slope * gate)
        return bent * up_limit * torch.tanh(up / up_limit)

    assert numbers(recognise(function, 6, parts=2)) == (BENT, slope, up_limit, gate_limit)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: torch.tanh(rows[:, :6]) * rows[:, 6:],
        lambda rows: torch.tanh(rows[:, :6]) * torch.tanh(rows[:, 6:]),
        lambda rows: silu(rows[:, 6:]) * rows[:, :6],  # up before gate
        lambda rows: silu(rows[:, ::2]) * rows[:, 1::2],  # in turns
        lambda rows: silu(rows[:, :6]).clamp(max=50.0) * rows[:, 6:],
        lambda rows: silu(rows[:, :6]) * rows[:, 6:].clamp(-50.0, 60.0),
        lambda rows: (silu(rows[:, :6]) * rows[:, 6:]).double(),
        lambda rows: silu(rows[:, :6]) * rows[:, 6:] * 2.0,
        lambda rows: torch.zeros_like(rows[:, :6]),
        lambda rows: rows,
    ],
)
def test_anything_else_is_left_to_torch(function: Callable[[Tensor], Tensor]) -> None:
    assert recognise(function, 6, parts=2) is None
