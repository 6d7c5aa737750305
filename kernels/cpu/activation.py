"""The architecture's activation in the compiled kernels: recognised by C++, or run in torch.

C++ computes the usual curves, gated or not (kernels/cpu/curves.h); `recognise` finds the curve by
trying the callable, not by its name. Any other activation (and a post norm) runs in torch, in
blocks (`by_blocks`), so that a row's bits do not depend on the other rows of the call.

Shape legend as in kernels/reference.py; A is the number of slots in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kernels.cpu.interface import Record, floats, numbers

# torch runs an elementwise operation of fewer elements than this on one thread, in vectors of up to
# 64 elements: blocks within these limits give a row the same bits whatever the other rows are.
_TORCH_GRAIN = 32768
_TORCH_VECTOR = 64

_Function = Callable[[Tensor], Tensor]
_BENT = 5
_HUGE = 1e6  # larger than any clamp
_TINY = 1e-4  # so small that nothing bends it
# Explicit, because torch's defaults may be another dtype or device.
_PLACE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Activation(Record, struct="Activation"):
    """(clamp(up, -limit, limit) + offset) * curve(min(gate, limit)), or min(curve(gate), limit) if
    ``late``, or curve(gate) alone; the last curve is BENT of kernels/cpu/curves.h."""

    _fields_ = (
        *numbers("curve"),  # index into _curves()
        *floats("slope", "limit", "offset"),
        *numbers("late"),
    )


def _curves(slope: float) -> list[_Function]:
    return [
        lambda x: x * torch.sigmoid(slope * x),
        lambda x: gelu(x, approximate="tanh"),
        gelu,
        torch.relu,
        lambda x: torch.relu(x) ** 2,
    ]


@torch.no_grad()
def recognise(
    function: _Function, width: int, parts: int, interleaved: bool = False
) -> Activation | None:
    """The activation that `function` computes to 1e-6, or None for one that C++ does not know.

    Single points give the candidate's slope, limit and offset; random rows from small to huge then
    confirm each curve with them.

    Args:
        function: (S, parts * width) -> (S, width).
        parts: 2 for gate and up, 1 for the gate alone.
        interleaved: gate and up alternate, instead of one after the other.
    """

    def call(gate: Tensor, up: Tensor) -> Tensor:
        if parts == 1:
            return function(gate)
        joined = torch.stack((gate, up), -1).flatten(1) if interleaved else torch.cat((gate, up), 1)
        return function(joined)

    def at(gate: float, up: float) -> float:
        shape = 2, width
        return float(call(torch.full(shape, gate, **_PLACE), torch.full(shape, up, **_PLACE))[0, 0])

    scale = torch.logspace(-2, 4, 32, **_PLACE)[:, None]
    random = torch.Generator("cpu").manual_seed(0)
    gate, up = (torch.randn(32, width, generator=random, **_PLACE) * scale for _ in range(2))
    actual = call(gate, up)
    if actual.dtype != torch.float32 or actual.shape != gate.shape:
        return None
    slope, limit, offset = _numbers(at, parts)
    factor = up.clamp(-limit, limit) + offset if parts == 2 else torch.ones_like(up)
    clamped = gate.clamp(max=limit)
    for index, curve in enumerate(_curves(slope)):
        if _are_equal(actual, factor * curve(clamped), factor * clamped):
            return Activation(index, slope, limit, offset)
        late = curve(gate).clamp(max=limit)
        if parts == 2 and _are_equal(actual, factor * late, factor * gate.clamp(max=limit)):
            return Activation(index, slope, limit, offset, late=True)
    if parts == 2:
        slope, limit, offset = _bent_numbers(at)
        factors = _bent(gate, offset), torch.sigmoid(slope * gate), _bent(up, limit)
        if _are_equal(actual, factors[0] * factors[1] * factors[2], factors[0] * factors[2]):
            return Activation(_BENT, slope, limit, offset)
    return None


def _are_equal(actual: Tensor, expected: Tensor, arguments: Tensor) -> bool:
    """A curve's tail is a small difference of large numbers: exact to its arguments only."""
    scale = torch.maximum(expected.abs(), arguments.abs())
    return bool(((actual - expected).abs() <= 1e-6 * scale + 1e-30).all())


def _bent(x: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(x / limit)


def _bent_numbers(at: Callable[[float, float], float]) -> tuple[float, float, float]:
    """Slope, limit of up and limit of the gate, supposing that the function is BENT."""
    curve, largest = at(0.5, _TINY) / _TINY, at(0.5, _HUGE)
    if not (1e-6 < curve < _HUGE and 0 < largest < _HUGE):
        return 1.0, 1.0, 1.0
    limit = _rounded(largest / curve)
    offset = _rounded(at(_HUGE, _HUGE) / limit)
    sigmoid = largest / limit / (offset * math.tanh(0.5 / offset)) if offset > 0 else 0.0
    slope = _rounded(2 * math.log(sigmoid / (1 - sigmoid))) if 0 < sigmoid < 1 else 1.0
    return slope, limit, offset


def _numbers(at: Callable[[float, float], float], parts: int) -> tuple[float, float, float]:
    """Slope, limit and offset of the function of (gate, up), supposing that C++ knows it."""
    limit, offset, curve = math.inf, 0.0, at(0.5, 0.25)
    if parts == 2:
        curve = (at(0.5, 0.25) - at(0.5, 0.0)) / 0.25
        if not 1e-6 < abs(curve) < _HUGE:
            return 1.0, limit, offset
        offset = _rounded(at(0.5, 0.0) / curve)
        largest = at(0.5, _HUGE) / curve - offset
        limit = _rounded(largest) if 0 < largest < 0.99 * _HUGE else math.inf
    sigmoid = curve / 0.5
    slope = _rounded(2 * math.log(sigmoid / (1 - sigmoid))) if 0 < sigmoid < 1 else 1.0
    return slope, limit, offset


def _rounded(value: float) -> float:
    """Rounded to 5 digits: float32 arithmetic blurs the others."""
    return float(f"{value:.5g}") if abs(value) > 1e-5 else 0.0


def empty_rows(count: int, width: int) -> Tensor:
    """Uninitialised float32 rows on the CPU, whatever torch's defaults are."""
    return torch.empty(count, width, **_PLACE)


def by_blocks(function: _Function, rows: Tensor, width: int) -> Tensor:
    """`function(rows)` in float32, in blocks, so that a row's bits do not depend on other rows."""
    block = max(1, (_TORCH_GRAIN - 1) // rows.shape[1]) if width % _TORCH_VECTOR == 0 else 1
    output = empty_rows(rows.shape[0], width)
    for begin in range(0, rows.shape[0], block):
        part = rows[begin : begin + block]
        if part.shape[0] == 1 < block:  # a view of one row is contiguous, of several it is not
            part = part.repeat(2, 1)
        output[begin : begin + block] = function(part)[: rows.shape[0] - begin]
    return output
