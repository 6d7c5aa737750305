"""The weighted sum of rows that experts gave, wherever they were computed.

One definition for all kernels: products are rounded, then added in slot order, in the rows' dtype.
So rows that come back from other processes give the bits that `experts_forward` gives where all
experts are at hand.

Shape legend as in kernels/reference.py; A is the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu import choose_kernel

_NATIVE = (torch.float32, torch.bfloat16)


def weighted_sum(
    row_AH: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
    more_BH: Tensor | None = None,
) -> Tensor:
    """``(T, H)`` in ``dtype``: `sum_k weights[t, k] * row[position[t, k]]`.

    Args:
        row_AH: experts' outputs before their weights, in the dtype of the sum.
        position_TK: integer row of each slot, negative for an unused one.
        weights_TK: float32.
        dtype: of the result, rounded once at the end.
        more_BH: rows that are counted on from those, wherever they lie.
    """
    more_BH = row_AH[:0] if more_BH is None else more_BH
    native = None
    if row_AH.device.type == "cpu" and row_AH.dtype == torch.float32 and dtype in _NATIVE:
        native, _ = choose_kernel()
    if native is not None:
        position_TK, weights_TK = position_TK.int().contiguous(), weights_TK.contiguous()
        rows = row_AH.contiguous(), more_BH.contiguous()
        return native.weighted_sum(rows[0], position_TK, weights_TK, dtype, rows[1])
    row_AH = torch.cat([row_AH, more_BH])
    output_TH = row_AH.new_zeros(position_TK.shape[0], row_AH.shape[1])
    if len(row_AH):
        weights_TK = weights_TK.to(row_AH.dtype).masked_fill(position_TK < 0, 0)
        for k, position_T in enumerate(position_TK.clamp(min=0).unbind(1)):
            used_T1 = (position_TK[:, k, None] >= 0).to(row_AH.device)
            product_TH = weights_TK[:, k, None] * row_AH[position_T]
            output_TH += product_TH.where(used_T1, product_TH.new_zeros(()))
    return output_TH.to(dtype)
