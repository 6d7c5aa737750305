"""Data types, the rows of a block, and activations: the common part of the Triton kernels.

`TRITON_INTERPRET=1` runs the kernels on CPU tensors. numpy has no bf16, and its arithmetic is
silently wrong there, so interpreted kernels convert to float32 right after each load.

A program of a grouped kernel works on a block: `ROWS` slots of one expert. The grid has as many
blocks as any routing of this many slots could need (see routing.py); those without work return.

Kernels of decode steps overlap (CUDA's programmatic dependent launch, from sm_90 on): each is
launched with `overlap_options`, and calls `wait_for_others` before all else. So its programs are
on their places when the kernel before ends, instead of being launched then. That kernel has waited
in turn, so that all which was launched earlier is over, whoever launched it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cpu.activation import Activation

INTERPRETED: bool = knobs.runtime.interpret

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
DTYPES = frozenset(_TYPES)


class Epilogue(NamedTuple):
    """The activation fused into a first projection, and how the projection's outputs lie.

    Attributes:
        parts: 2 for gate and up, 1 for a matrix without a gate.
        interleaved: the parts' outputs take turns, instead of one part after the other.
        activation: applied before anything is written; None writes the projection itself.
    """

    parts: int = 1
    interleaved: bool = False
    activation: Activation | None = None

    @property
    def gated(self) -> bool:
        return self.activation is not None and self.parts == 2

    @property
    def numbers(self) -> tuple[float, float, float]:
        known = self.activation
        return (1.0, 0.0, 0.0) if known is None else (known.slope, known.limit, known.offset)

    @property
    def curve(self) -> int:
        """The activation's number, 8 more where its limit is late, -1 for none."""
        known = self.activation
        return -1 if known is None else int(known.curve) + (8 if known.late else 0)

    def strides(self, units: int) -> tuple[int, int]:
        """Outputs from unit to unit, and from part to part."""
        return (self.parts, 1) if self.interleaved else (1, units)


def compute_type(*dtypes: torch.dtype) -> Any:
    """Triton's type of the products of operands of these dtypes (sums are float32 always)."""
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return tl.float32 if INTERPRETED else _TYPES[widest]


def overlap_options() -> dict[str, bool]:
    """Return the options of a launch of a kernel that calls `wait_for_others`."""
    able = _overlaps()
    return {"PDL": able, "launch_pdl": able}


@cache
def _overlaps() -> bool:
    able = not INTERPRETED and torch.cuda.is_available()
    return able and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_for_others(PDL: tl.constexpr):
    """Wait until all that was launched before is over; then the next kernel may come."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def block_slots(order, offsets, expert, first, ROWS: tl.constexpr):
    """The slots of a block and which of its rows are in use."""
    position = first + tl.arange(0, ROWS)
    used = position < tl.load(offsets + expert + 1)
    return tl.load(order + position, mask=used, other=0), used


@triton.jit
def add_bias(sums, bias, expert, columns, width, inside, HAS_BIAS: tl.constexpr):
    """``sums`` plus the expert's bias, where it has one."""
    if HAS_BIAS:
        at = expert.to(tl.int64) * width + columns
        sums += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def masked_by(mask, scalar):
    """``mask & scalar``; the interpreter turns a spread scalar comparison into a number."""
    return (mask & scalar) != 0


@triton.jit
def curve(x, slope, CURVE: tl.constexpr):
    """The curve of that number in kernels/cpu/activation.py."""
    if CURVE == 0:
        y = x / (1.0 + tl.exp(-slope * x))
    elif CURVE == 1:  # (1 + tanh(y)) / 2 is sigmoid(2 y)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif CURVE == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if CURVE == 4:
            y = y * y
    return y


@triton.jit
def bent(x, limit):
    """``limit * tanh(x / limit)``"""
    return limit * (2.0 / (1.0 + tl.exp(-2.0 * x / limit)) - 1.0)


@triton.jit
def at_most(x, limit):
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(gate, up, slope, limit, offset, CURVE: tl.constexpr, GATED: tl.constexpr):
    """``(clamp(up, -limit, limit) + offset) * curve(min(gate, limit))``, or ``curve(gate)``. With
    CURVE + 8, ``min(curve(gate), limit)`` in place of the curve; 5 is BENT of
    kernels/cpu/curves.h."""
    if CURVE == 5:
        y = bent(gate, offset) * bent(up, limit) / (1.0 + tl.exp(-slope * gate))
    else:
        if CURVE >= 8:
            y = at_most(curve(gate, slope, CURVE - 8), limit)
        else:
            y = curve(at_most(gate, limit), slope, CURVE)
        if GATED:
            up = at_most(up, limit)
            y *= tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL) + offset
    return y
