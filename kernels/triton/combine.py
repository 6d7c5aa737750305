"""The weighted sum of each token's slots, in slot order and float32: no atomics.

Products are rounded before they are added (no fused multiply-add), as in kernels/sums.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import masked_by

_COLUMNS = 256


@triton.jit
def combine_kernel(
    rows, ids, weights, output, experts, K, H, COLUMNS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < H
    sums = tl.zeros((COLUMNS,), tl.float32)
    if ADD:
        sums += tl.load(output + token * H + columns, mask=inside, other=0.0)
    for k in range(0, K):
        slot = token * K + k
        expert = tl.load(ids + slot)
        used = (expert >= 0) & (expert < experts)
        wanted = masked_by(inside, used)
        row = tl.load(rows + slot * H + columns, mask=wanted, other=0.0).to(tl.float32)
        weight = tl.load(weights + slot, mask=used, other=0.0)
        # An id that does not exist: the host is not asked, so the row says it.
        weight = tl.where((expert < -1) | (expert >= experts), float("nan"), weight)
        sums += weight * row
    tl.store(output + token * H + columns, sums.to(output.dtype.element_ty), mask=inside)


def combine(
    row_SH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: int,
    add_to_TH: Tensor | None = None,
) -> Tensor:
    """(T, H) in rows' dtype: ``sum_k weights[t, k] * rows[t * K + k]`` over the slots in use.

    A float32 sum so far is added to in place, and returned. A token with an id outside
    [-1, experts) becomes NaN.
    """
    tokens, slots = expert_ids_TK.shape
    output_TH = add_to_TH
    if output_TH is None:
        output_TH = torch.empty(tokens, row_SH.shape[1], dtype=row_SH.dtype, device=row_SH.device)
    combine_kernel[tokens, triton.cdiv(row_SH.shape[1], _COLUMNS)](
        row_SH, expert_ids_TK, weights_TK, output_TH, experts, slots, row_SH.shape[1],
        COLUMNS=_COLUMNS, ADD=add_to_TH is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return output_TH
