"""Grouped projections with weights kept whole: ``output[slot] = x[slot // share] W[expert]^T``.

Sums run along K in steps of a fixed depth and are never split between programs, so that a row's
bits depend on its own input only. A known activation is applied before anything is written; with a
gate the two rows of a unit are summed side by side for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import Gate, activate, add_bias, block_slots, compute_type
from kernels.triton.routing import Blocks
from kernels.triton.tiles import Tile

_DEPTH = 64


@triton.jit
def whole_kernel(
    x, weight, bias, output, order, offsets, block_expert, block_first,
    share, unit_stride, part_stride, width, N, K, slope, limit, offset,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    slots, used = block_slots(order, offsets, expert, tl.load(block_first + block), ROWS)
    units = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = units < N
    rows = units * unit_stride
    depth = tl.arange(0, DEPTH)
    from_x = x + (slots // share).to(tl.int64)[:, None] * K + depth[None, :]
    row = expert.to(tl.int64) * width + rows
    from_gate = weight + row[None, :] * K + depth[:, None]
    from_up = weight + (row + part_stride)[None, :] * K + depth[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = sums
    for k in range(0, K, DEPTH):
        rest = depth < K - k
        x_tile = tl.load(from_x + k, mask=used[:, None] & rest[None, :], other=0.0).to(COMPUTE)
        mask = rest[:, None] & inside[None, :]
        tile = tl.load(from_gate + k, mask=mask, other=0.0).to(COMPUTE)
        sums = tl.dot(x_tile, tile, sums, input_precision="ieee")
        if GATED:
            tile = tl.load(from_up + k, mask=mask, other=0.0).to(COMPUTE)
            up = tl.dot(x_tile, tile, up, input_precision="ieee")
    sums = add_bias(sums, bias, expert, rows, width, inside, HAS_BIAS)
    if GATED:
        up = add_bias(up, bias, expert, rows + part_stride, width, inside, HAS_BIAS)
    if CURVE >= 0:
        sums = activate(sums, up, slope, limit, offset, CURVE, GATED)
    to = output + slots.to(tl.int64)[:, None] * N + units[None, :]
    tl.store(to, sums.to(output.dtype.element_ty), mask=used[:, None] & inside[None, :])


def project(
    x_XK: Tensor,
    weight_EWK: Tensor,
    bias_EW: Tensor | None,
    blocks: Blocks,
    tile: Tile,
    *,
    share: int = 1,
    gate: Gate | None = None,
) -> Tensor:
    """Rows of all slots in x's dtype: (S, W), or (S, W / parts) of a known activation.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        weight_EWK: contiguous.
        bias_EW: contiguous, or None.
        blocks: from `routing`, with blocks of ``tile.rows``.
        gate: for a first projection.
    """
    width, size = weight_EWK.shape[1:]
    gate = gate if gate is not None and gate.activation is not None else Gate()
    units = width // gate.parts
    output_SN = torch.empty(blocks.order_S.shape[0], units, dtype=x_XK.dtype, device=x_XK.device)
    whole_kernel[blocks.count, triton.cdiv(units, tile.columns)](
        x_XK, weight_EWK, bias_EW, output_SN,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, *gate.strides(units), width, units, size, *gate.numbers,
        CURVE=gate.curve, GATED=gate.gated, HAS_BIAS=bias_EW is not None,
        COMPUTE=compute_type(x_XK.dtype, weight_EWK.dtype),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=_DEPTH, **tile.options,
    )  # fmt: skip
    return output_SN
