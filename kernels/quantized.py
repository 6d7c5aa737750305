"""The arithmetic on nested bit planes in plain torch.

It is part of the format, so that every kernel gives the same numbers. Activations are quantised row
by row and group by group to 8 bits: with ``a`` the largest magnitude of a group,
``scale = a / 127`` and ``q = rint(x * (127 / a))``; a group below `TINY` counts as zero. The dot
product of a group is a sum of integers, ``q * (code - 136)``, and therefore exact; the products
``(weight scale * activation scale) * dot`` are added in float32 in the order of the groups. What an
activation function makes of the first projection is quantised in the same way for the second.

Shape legend as in kernels/reference.py; N rows and K columns of a matrix, D groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import planes as nested
from kernels.planes import ZERO_CODE, PlaneMatrix, QuantizedExperts

TINY = 2.0**-100
_MAX_CODE = 127


def join_matrices(matrices: Sequence[PlaneMatrix]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The blobs of one expert's planes, and of its scales, from its matrices in order."""
    planes = zip(*(matrix.planes for matrix in matrices), strict=True)
    scales = torch.cat([matrix.scales for matrix in matrices])
    return tuple(torch.cat(blobs) for blobs in planes), scales


def quantize_rows(x_TK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Activations as (T, D, group_size) whole numbers in float32 and (T, D) float32 scales."""
    x_TDG = pad(x_TK.float(), (0, -x_TK.shape[1] % group_size)).unflatten(1, (-1, group_size))
    largest_TD = x_TDG.abs().amax(-1)
    tiny_TD = largest_TD < TINY
    largest_TD = largest_TD.masked_fill(tiny_TD, 0.0)
    # One multiplication and one division, each rounded once, as kernels do it: torch makes of
    # `127 / tensor` a reciprocal and a product.
    inverse_TD = (largest_TD.new_tensor(_MAX_CODE) / largest_TD).masked_fill(tiny_TD, 0.0)
    return torch.round(x_TDG * inverse_TD[..., None]), largest_TD / _MAX_CODE


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias``: (T, N) in x's dtype.

    Raises:
        ValueError: x is not (T, K).
    """
    check_rows(x_TK, matrix)
    return _project(x_TK, matrix, matrix.bias).to(x_TK.dtype)


def check_rows(x_TK: Tensor, matrix: PlaneMatrix) -> None:
    """Raise ValueError where x is not (T, K)."""
    if x_TK.dim() != 2 or x_TK.shape[1] != matrix.layout.columns:
        raise ValueError(f"x must be (T, {matrix.layout.columns}), got {tuple(x_TK.shape)}")


def one_expert(row_RH: Tensor, expert: int, experts: QuantizedExperts) -> Tensor:
    """(R, H) float32: the expert's output for each row, before routing weights."""
    *first, second = experts.matrices(expert)
    projected = [_project(row_RH, matrix, None) for matrix in first]
    own = torch.stack(projected, -1).flatten(1) if experts.interleaved else torch.cat(projected, 1)
    if experts.gate_up_bias_EG is not None:
        own = own + experts.gate_up_bias_EG[expert].float()
    bias = None if experts.down_bias_EH is None else experts.down_bias_EH[expert]
    output_RH = _project(experts.activation(own), second, bias)
    return output_RH if experts.post_norm is None else experts.post_norm(output_RH)


def _project(x_TK: Tensor, matrix: PlaneMatrix, bias: Tensor | None) -> Tensor:
    """(T, N) float32."""
    layout, size = matrix.layout, matrix.layout.group_size
    q_TDG, scale_TD = quantize_rows(x_TK, size)
    codes = nested.unpack(matrix.planes, layout)
    padding = (0, layout.padded_columns - layout.columns)
    codes_NDG = pad(codes, padding, value=ZERO_CODE).unflatten(1, (-1, size)).float() - ZERO_CODE
    # Whole numbers below 2^24: exact in float32 in any order.
    dot_DTN = torch.bmm(q_TDG.transpose(0, 1), codes_NDG.permute(1, 2, 0))
    weight_ND = nested.unpack_scales(matrix.scales, layout).float()
    output_TN = dot_DTN.new_zeros(dot_DTN.shape[1:])
    for group, dot_TN in enumerate(dot_DTN):
        output_TN += (scale_TD[:, group, None] * weight_ND[:, group]) * dot_TN
    return output_TN if bias is None else output_TN + bias.float()
