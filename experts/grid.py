"""Exact quantization of weights that are on a grid already: they are not rounded a second time.

A checkpoint with 4-bit weights (MXFP4, GPTQ, AWQ, compressed-tensors) holds small multiples of one
scale a group. `quantize_exactly` finds the scale from the values alone: neither the format they
came in matters nor that they were later saved as bf16, and no tensor must be traced through the
conversions of transformers. Such a group keeps its weights exactly: it gets that scale, divided by
a power of two so that the multiples fill the 8 bits, as coarse prefixes need the high bits.
Multiples in [-8, 7], the codes of 4 bits without a zero point, are exact in the first 4 bits, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import planes

MOST_STEPS = 16
"""Largest multiple of a scale: 4-bit codes minus a zero point lie in [-16, 15]."""

_SAMPLES = 32  # rows that show whether a weight may be on a grid
_FEW = 4  # columns that rule most wrong steps out


def quantize_exactly(weight_NK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """`kernels.planes.quantize`, but groups on a grid keep their weights exactly.

    A group of float32, or of anything exact in float32, is on a grid when its values are whole
    multiples, `MOST_STEPS` at most, of one float16 number.
    """
    codes, scales = planes.quantize(weight_NK, group_size)
    rows = weight_NK.flatten(0, -2)
    if not _on_a_grid(rows[:: max(1, rows.shape[0] // _SAMPLES)], group_size):
        return codes, scales
    groups = _groups(weight_NK, group_size)
    flat = groups.flatten(0, -2)
    step = _steps(flat)
    on_grid = step > 0
    fine = _fill(-flat.amin(-1), flat.amax(-1), step)
    exact = (flat / fine.masked_fill(~on_grid, 1.0)[:, None] + planes.ZERO_CODE).to(torch.uint8)
    codes = pad(codes, (0, -codes.shape[-1] % group_size), value=planes.ZERO_CODE)
    codes = torch.where(on_grid[:, None], exact, codes.reshape(exact.shape)).view(groups.shape)
    scales = torch.where(on_grid.view(scales.shape), fine.view(scales.shape).half(), scales)
    return codes.flatten(-2)[..., : weight_NK.shape[-1]].contiguous(), scales


def _groups(weight_NK: Tensor, group_size: int) -> Tensor:
    padding = (0, -weight_NK.shape[-1] % group_size)
    return pad(weight_NK.float(), padding).unflatten(-1, (-1, group_size))


def _on_a_grid(rows_RK: Tensor, group_size: int) -> bool:
    """Return whether any group of these rows is on a grid."""
    flat = _groups(rows_RK, group_size).flatten(0, -2)
    return bool((_steps(flat) > 0).any())


def _steps(groups: Tensor) -> Tensor:
    """``(R,)``: the largest grid step of each of ``(R, group)`` rows, 0 for none."""
    largest = groups.abs().amax(-1)
    found = torch.zeros_like(largest)
    counts_C1 = torch.arange(1, MOST_STEPS + 1, device=groups.device)[:, None]
    steps_CR = largest / counts_C1
    # a wrong count rarely gives a float16, so few rows are checked in full
    may_CR = (steps_CR > 0) & (steps_CR.half().float() == steps_CR)
    may_CR &= steps_CR * counts_C1 == largest
    for index in may_CR.any(1).nonzero().flatten().tolist():
        step = steps_CR[index]
        rows = (may_CR[index] & (found == 0)).nonzero().squeeze(1)
        for some in (groups[:, :_FEW], groups):  # a wrong count rarely passes the first
            own = some[rows]
            off = own.div(step[rows, None]).round_().mul_(step[rows, None]).sub_(own)
            rows = rows[off.abs_().amax(-1) == 0]
        found[rows] = step[rows]
    return found


def _fill(low: Tensor, high: Tensor, step: Tensor) -> Tensor:
    """The step over the largest power of two that fits values in [-low, high] into 8 bits.

    Negative where `high` is larger: codes have more room below zero. The largest code is then at
    least 60 from zero, but where float16 has no such small numbers.
    """
    below, above = planes.ZERO_CODE, planes.MAX_CODE - planes.ZERO_CODE
    larger, smaller, fine = torch.maximum(low, high), torch.minimum(low, high), step
    for power in range(1, 8):
        finer = step / 2**power
        fits = (larger <= below * finer) & (smaller <= above * finer)
        fine = torch.where(fits & (finer.half().float() == finer), finer, fine)
    return torch.where(high > low, -fine, fine)
