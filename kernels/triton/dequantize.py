"""Panels of weights from bit planes, rounded to the activations' dtype once.

Very many rows read them, because decoding them again for every block of rows would cost more than
writing them down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.planes import PlaneLayout
from kernels.scales import BLOCK_ROWS
from kernels.triton.codes import FP8, has_offsets, in_order, less_middle
from kernels.triton.language import Epilogue, compute_type
from kernels.triton.planes import (
    addresses,
    bytes_of_block,
    chunks_of,
    constants_of,
    load_unit,
    numbers_of,
    plane_bases,
)

_DEQUANTIZING_WARPS = 4


@triton.jit
def dequantize_unit(
    bases, to, unit, wanted, inside, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Write a unit of each warp.

    Args:
        to: (8, 1, 2, 1) pointers of rows q and 8 + q.
        inside: (8, 1, 2, 1) of these.
    """
    PARTS: tl.constexpr = unit.shape[0]
    own = load_unit(bases, unit, wanted, BITS, KIND, PLANES, GROUP, TAIL, True, 0)
    for T in tl.static_range(1 if TAIL else 2):
        numbers = numbers_of(own, T, 0, BITS, KIND, PLANES, COMPUTE).to(tl.float32)
        if (KIND == 0 and PLANES == 4) or (KIND > 0 and KIND < FP8 and BITS > 4 and PLANES == 2):
            numbers += numbers_of(own, T, 1, BITS, KIND, PLANES, COMPUTE).to(tl.float32)
        numbers = in_order(numbers)
        numbers = less_middle(numbers, 1.0, BITS, KIND, PLANES, COMPUTE)
        if has_offsets(KIND):
            numbers += 2.0 ** (BITS - 1)
        weights = numbers * own[4 + 4 * T][:, :, None] + own[5 + 4 * T][:, :, None]
        if GROUP == 16:
            late = numbers * own[6 + 4 * T][:, :, None] + own[7 + 4 * T][:, :, None]
            weights = tl.where((tl.arange(0, 32) < 16)[None, None, :], weights, late)
        # Each thread has 8 neighbouring columns of two rows.
        weights = tl.permute(tl.reshape(weights, (PARTS, 2, 8, 32)), (2, 0, 1, 3))
        column = (unit * 64 + T * 32)[None, :, None, None] + tl.arange(0, 32)[None, None, None, :]
        mask = inside & wanted[None, :, None, None] & (column < K)
        tl.store(to + column, weights.to(to.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_block(
    begins, block, to, inside, chunks, block_bytes, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    bases = plane_bases(begins, block, chunks, block_bytes, BITS, KIND)
    part, units = tl.arange(0, PARTS), chunks // 2
    for step in range(0, tl.cdiv(units, PARTS)):
        unit = step * PARTS + part
        dequantize_unit(
            bases, to, unit, unit < units, inside, K, BITS, KIND, PLANES, COMPUTE, GROUP, False
        )
    if chunks % 2 != 0:
        dequantize_unit(
            bases, to, units + part, part == 0, inside, K, BITS, KIND, PLANES, COMPUTE, GROUP, True
        )


@triton.jit
def dequantize_kernel(
    table, experts, output, first_row, width, unit_stride, part_stride, K, chunks, last_row,
    block_bytes, BITS: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, MATRICES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A program has a block of 16 rows of one of an expert's MATRICES."""
    own, matrix = tl.program_id(1) // MATRICES, tl.program_id(1) % MATRICES
    expert = tl.load(experts + own)
    if expert < 0:
        return
    begins = addresses(table + (expert * MATRICES + matrix) * 5)
    block = first_row // 16 + tl.program_id(0)
    rows = block * 16 + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    row = own.to(tl.int64) * width + (rows - first_row) * unit_stride + matrix * part_stride
    to = (output + row * K)[:, None, :, None]
    inside = (rows < last_row)[:, None, :, None]
    if KIND > 0:
        if begins[1] != 0:
            dequantize_block(
                begins, block, to, inside, chunks, block_bytes, K,
                BITS, KIND, 2, COMPUTE, GROUP, PARTS,
            )  # fmt: skip
        else:
            dequantize_block(
                begins, block, to, inside, chunks, block_bytes, K,
                BITS, KIND, 1, COMPUTE, GROUP, PARTS,
            )  # fmt: skip
    elif begins[3] != 0:
        dequantize_block(
            begins, block, to, inside, chunks, block_bytes, K, BITS, KIND, 4, COMPUTE, GROUP, PARTS
        )
    elif begins[2] != 0:
        dequantize_block(
            begins, block, to, inside, chunks, block_bytes, K, BITS, KIND, 3, COMPUTE, GROUP, PARTS
        )
    elif begins[1] != 0:
        dequantize_block(
            begins, block, to, inside, chunks, block_bytes, K, BITS, KIND, 2, COMPUTE, GROUP, PARTS
        )
    else:
        dequantize_block(
            begins, block, to, inside, chunks, block_bytes, K, BITS, KIND, 1, COMPUTE, GROUP, PARTS
        )


def dequantized(
    table_EP5: Tensor,
    layout: PlaneLayout,
    dtype: torch.dtype,
    expert_P: Tensor,
    *,
    rows: range | None = None,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """(P, parts * rows, K) weights in `dtype`, in the order of the projection.

    Args:
        expert_P: int32; the place of a negative one holds junk.
        rows: of a matrix of one part, from a multiple of 16 on; None for all.
        epilogue: says how parts lie in the projection.
    """
    epilogue = Epilogue() if epilogue is None else epilogue
    rows = range(layout.rows) if rows is None else rows
    width = epilogue.parts * len(rows)
    output = torch.empty(len(expert_P), width, layout.columns, dtype=dtype, device=table_EP5.device)
    dequantize_kernel[triton.cdiv(len(rows), BLOCK_ROWS), len(expert_P) * epilogue.parts](
        table_EP5, expert_P, output, rows.start, width, *epilogue.strides(len(rows)),
        layout.columns, chunks_of(layout), rows.stop, bytes_of_block(layout),
        COMPUTE=compute_type(dtype), MATRICES=epilogue.parts, PARTS=_DEQUANTIZING_WARPS,
        **constants_of(layout), num_warps=_DEQUANTIZING_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return output
