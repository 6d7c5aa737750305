"""Codes that lose little: rounding errors compensated on inputs, one prefix after the other.

GPTQ rounds a matrix column by column and moves what each column lost onto the columns still to
come, weighted by how inputs move together (`H = sum x x^T`, Cholesky of its inverse, as published).
Here the code is nested, so it is done once a prefix: first 2 bits against the original weight, then
the next plane against the original weight again, each code free only within the cell that its
prefix has fixed; and so on. Every prefix is thereby compensated for itself. A weight that left its
own cell for a coarse prefix is lost to the finer ones, so but for the finest none is moved further
than `REACH`. Where only one precision will be read, that width alone loses least.

Rows are independent, and at each prefix a row keeps whichever loses less on the inputs, compensated
codes or plain rounding within its cells. Columns are taken in order of their inputs' size.
Legend: X matrices, N rows, K columns, D groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import planes

DAMPING = 0.01
"""Added to the diagonal of H, as a share of its mean."""

REACH = 0.25
"""How far compensation for a coarse prefix may move a weight, in its steps. Measured on the shipped
model with text that neither calibrates nor tests, KL in bits a token at 2, 4 and 8 bits: .030,
.0028, .0002 at 0.1; .0225, .0035, .0008 at 0.25; .0200, .0044, .0016 at 0.4; .0191, .0052, .0023 at
0.5; and .0185, .0013, .0001 where each width is done alone."""

Cell = tuple[Tensor, Tensor]
"""Smallest and largest code of each weight that begin with the prefix that is fixed already."""

_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of inputs as compensation uses them; made once for all widths.

    Attributes:
        order_XK: columns in the order in which they are taken.
        ordered_XKK: the moments, in that order.
        upper_XKK: upper Cholesky factor of the inverse of the damped moments, in that order.
    """

    order_XK: Tensor
    ordered_XKK: Tensor
    upper_XKK: Tensor

    @classmethod
    def of(cls, moment_XKK: Tensor) -> Moments:
        """Of ``(X, K, K)`` second moments; zero for no inputs at all."""
        order = moment_XKK.diagonal(dim1=-2, dim2=-1).argsort(-1, descending=True)
        rows = order[:, :, None].expand_as(moment_XKK)
        ordered = moment_XKK.float().gather(1, rows).gather(2, rows.transpose(1, 2))
        return cls(order, ordered, _inverse_factor(damped(ordered)))


def compensate(
    weight_XNK: Tensor,
    moments: Moments,
    scales_XND: Tensor,
    group_size: int,
    widths: Sequence[int],
) -> Tensor:
    """Codes whose prefixes of each of `widths` bits lose little on the inputs.

    Args:
        weight_XNK: ``(X, N, K)`` floating point, finite.
        moments: of the inputs of each.
        scales_XND: ``(X, N, D)`` scales of the codes, as `kernels.planes.quantize` makes them.
        group_size: columns that share a scale.
        widths: prefixes in bits, ascending; the finest decides the last bits of the codes.

    Returns:
        ``(X, N, K)`` uint8 codes; bits beyond the finest width are those of its centre.
    """
    weight = weight_XNK.float()
    columns = moments.order_XK[:, None, :].expand_as(weight)
    ordered = weight.gather(-1, columns)
    scale = spread(scales_XND, group_size, weight.shape[-1]).gather(-1, columns)
    position = ordered / scale.masked_fill(scale == 0, 1.0) + planes.ZERO_CODE
    within = torch.zeros_like(position), torch.full_like(position, planes.MAX_CODE)
    for bits in widths:
        plain = nearest(position.clamp(*within), bits)
        lost_plain, centres = (plain - planes.ZERO_CODE) * scale - ordered, plain
        if bool(lost_plain.any()):  # weights that are on a coarse grid lose nothing
            reachable = within if bits == widths[-1] else _reachable(position, bits, within)
            centres = _sweep(ordered, moments.upper_XKK, scale, bits, reachable)
            lost = (centres - planes.ZERO_CODE) * scale - ordered
            more = ((lost - lost_plain) @ moments.ordered_XKK * (lost + lost_plain)).sum(-1)
            centres = torch.where((more <= 0)[..., None], centres, plain)
        within = cell(centres, bits)
    return torch.empty_like(centres).scatter_(-1, columns, centres).to(torch.uint8)


def damped(moment_XKK: Tensor) -> Tensor:
    """Moments with `DAMPING` on the diagonal; the identity where there were no inputs."""
    moment = moment_XKK.float()
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    eye = torch.eye(moment.shape[-1], device=moment.device)
    shift = torch.where(mean > 0, DAMPING * mean, 1.0)
    return moment + shift[:, None, None] * eye


def nearest(position: Tensor, bits: int) -> Tensor:
    """Centres of the prefixes of ``bits`` that are nearest to positions on the grid of codes.

    A position is ``weight / scale + ZERO_CODE``, in floating point.
    """
    step = 2 ** (8 - bits)
    if step == 1:
        return position.round().clamp(0, planes.MAX_CODE)
    return (position / step).floor().clamp(0, 2**bits - 1) * step + step / 2


def cell(centre: Tensor, bits: int) -> Cell:
    """Smallest and largest code that begin with the prefix of ``bits`` that `centre` stands for."""
    step = 2 ** (8 - bits)
    low = (centre / step).floor() * step
    return low, low + step - 1


def spread(scales_XND: Tensor, group_size: int, columns: int) -> Tensor:
    """``(X, N, K)`` float32: the scale of each weight."""
    return scales_XND.float().repeat_interleave(group_size, -1)[..., :columns]


def _reachable(position: Tensor, bits: int, within: Cell) -> Cell:
    """Where compensation may put weights at these positions: near them and within the cell."""
    reach = REACH * 2 ** (8 - bits)
    return (position - reach).clamp(*within), (position + reach).clamp(*within)


def _sweep(weight: Tensor, upper: Tensor, scale: Tensor, bits: int, reachable: Cell) -> Tensor:
    """Centres of one prefix, column by column; float32."""
    # Columns come first, as each is worked on for itself: they have to be contiguous.
    work, scale, low, high = (
        own.transpose(-2, -1).contiguous() for own in (weight, scale, *reachable)
    )
    divisor, centres = scale.masked_fill(scale == 0, 1.0), torch.empty_like(work)
    columns = work.shape[-2]
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty_like(work[:, start:end])
        for at in range(start, end):
            position = work[:, at] / divisor[:, at] + planes.ZERO_CODE
            centre = centres[:, at]
            centre[:] = nearest(position.clamp_(low[:, at], high[:, at]), bits)
            lost = work[:, at] - (centre - planes.ZERO_CODE) * scale[:, at]
            error, factor = errors[:, at - start], upper[:, at]
            torch.div(lost, factor[:, at, None], out=error)
            work[:, at + 1 : end].baddbmm_(factor[:, at + 1 : end, None], error[:, None], alpha=-1)
        work[:, end:].baddbmm_(upper[:, start:end, end:].transpose(-2, -1), errors, alpha=-1)
    return centres.transpose(-2, -1)


def _inverse_factor(moment: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse; in float64, as moments are badly conditioned."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()
