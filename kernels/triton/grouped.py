"""Grouped projections ``output[slot] = x[slot // share] W[expert]^T`` with whole weights.

Sums run along K in steps of a fixed depth and are never split between programs, so a row's bits
depend on its own input only. A known activation is fused (`Epilogue`): the gate and up rows of a
unit are summed side by side, and only the activation's output is written.

Prompts on GPUs with descriptors (sm_90 on) read weights by them: one instruction asks for a tile of
gate and up rows, which then is one operand of the widest matrix instruction.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.language import (
    INTERPRETED,
    Epilogue,
    activate,
    add_bias,
    block_slots,
    compute_type,
    overlap_options,
    wait_for_others,
)
from kernels.triton.routing import Blocks
from kernels.triton.tiles import Tile

_NO_EPILOGUE = Epilogue()
_DESCRIBED_ROWS = 64
"""Slots of a tile from which on weights come by descriptors: those of prompts."""


@triton.jit
def expert_of(block, block_expert, block_place, begin, count):
    """A block's expert, and its place among these weights: -1 where another call has them, or the
    block has no work."""
    expert = tl.load(block_expert + block)
    own = tl.load(block_place + block) - begin
    return expert, tl.where((expert >= 0) & (own >= 0) & (own < count), own, -1)


@triton.jit
def whole_kernel(
    x, weight, bias, output, order, offsets, block_expert, block_place, block_first,
    share, begin, count, unit_stride, part_stride, width, N, K, slope, limit, offset,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    block = tl.program_id(0)
    expert, own = expert_of(block, block_expert, block_place, begin, count)
    if own < 0:
        return
    slots, used = block_slots(order, offsets, expert, tl.load(block_first + block), ROWS)
    units = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = units < N
    rows = units * unit_stride
    depth = tl.arange(0, DEPTH)
    from_x = x + (slots // share).to(tl.int64)[:, None] * K + depth[None, :]
    row = own.to(tl.int64) * width + rows
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


@triton.jit
def described_kernel(
    x, weight, bias, output, order, offsets, block_expert, block_place, block_first,
    share, begin, count, unit_stride, part_stride, width, N, K, slope, limit, offset,
    CURVE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """As `whole_kernel`. Programs of a block come one after the other, so that its rows are read
    from memory once."""
    block, column = tl.program_id(1), tl.program_id(0) * COLUMNS
    expert, own = expert_of(block, block_expert, block_place, begin, count)
    if own < 0:
        return
    first = tl.load(block_first + block)
    if HALVES:  # noqa: SIM102 - one may not join a constant and a value
        if tl.load(offsets + expert + 1) - first <= ROWS // 2:
            project_block(
                x, weight, bias, output, order, offsets, expert, own, first, column, share,
                unit_stride, part_stride, width, N, K, slope, limit, offset,
                CURVE, PARTS, HAS_BIAS, COMPUTE, ROWS // 2, COLUMNS, DEPTH,
            )  # fmt: skip
            return
    project_block(
        x, weight, bias, output, order, offsets, expert, own, first, column, share,
        unit_stride, part_stride, width, N, K, slope, limit, offset,
        CURVE, PARTS, HAS_BIAS, COMPUTE, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip


@triton.jit
def project_block(
    x, weight, bias, output, order, offsets, expert, own, first, column, share,
    unit_stride, part_stride, width, N, K, slope, limit, offset,
    CURVE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`COLUMNS` units of a block's slots."""
    slots, used = block_slots(order, offsets, expert, first, ROWS)
    depth = tl.arange(0, DEPTH)
    from_x = x + (slots // share).to(tl.int64)[:, None] * K + depth[None, :]
    sums = tl.zeros((ROWS, PARTS * COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        mask = used[:, None] & (depth < K - k)[None, :]
        x_tile = tl.load(from_x + k, mask=mask, other=0.0).to(COMPUTE)
        tile = weight.load([own, 0, column, k]).reshape(PARTS * COLUMNS, DEPTH).to(COMPUTE)
        sums = tl.dot(x_tile, tile.T, sums, input_precision="ieee")
    units = column + tl.arange(0, COLUMNS)
    inside, rows = units < N, units * unit_stride
    up = sums
    if PARTS == 2:
        sums, up = sums.reshape(ROWS, PARTS, COLUMNS).permute(0, 2, 1).split()
        up = add_bias(up, bias, expert, rows + part_stride, width, inside, HAS_BIAS)
    sums = add_bias(sums, bias, expert, rows, width, inside, HAS_BIAS)
    if CURVE >= 0:
        sums = activate(sums, up, slope, limit, offset, CURVE, PARTS == 2)
    to = output + slots.to(tl.int64)[:, None] * N + units[None, :]
    tl.store(to, sums.to(output.dtype.element_ty), mask=used[:, None] & inside[None, :])


def project_whole(
    x_XK: Tensor,
    weight_PWK: Tensor,
    bias_EW: Tensor | None,
    blocks: Blocks,
    tile: Tile,
    *,
    share: int = 1,
    epilogue: Epilogue | None = None,
    begin: int = 0,
    place_B: Tensor | None = None,
    output_SN: Tensor | None = None,
) -> Tensor:
    """Rows of all slots in x's dtype: (S, W), or (S, W / parts) of a known activation.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        weight_PWK: contiguous, of P experts, which have the places from `begin` on; rows of others
            are not written.
        bias_EW: contiguous, of all experts, or None.
        blocks: from `routing`, with blocks of ``tile.rows``.
        epilogue: for a first projection.
        place_B: of each block's expert; None: an expert's place is its id.
        output_SN: to be written to; None for a new one.
    """
    count, width, size = weight_PWK.shape
    if epilogue is None or epilogue.activation is None:
        epilogue = _NO_EPILOGUE
    units = width // epilogue.parts
    if output_SN is None:
        output_SN = x_XK.new_empty(blocks.order_S.shape[0], units)
    strides, columns = epilogue.strides(units), triton.cdiv(units, tile.columns)
    dtype = torch.promote_types(x_XK.dtype, weight_PWK.dtype)
    given = (
        bias_EW, output_SN, blocks.order_S, blocks.offsets_E1, blocks.expert_B,
        blocks.expert_B if place_B is None else place_B, blocks.first_B,
        share, begin, count, *strides, width, units, size, *epilogue.numbers,
    )  # fmt: skip
    constants = {
        "CURVE": epilogue.curve, "HAS_BIAS": bias_EW is not None, "ROWS": tile.rows,
        "COLUMNS": tile.columns, "DEPTH": tile.depth_of(dtype),
        "COMPUTE": compute_type(dtype), **tile.options,
    }  # fmt: skip
    if tile.rows >= _DESCRIBED_ROWS and describable(x_XK, weight_PWK):
        parts = 2 if epilogue.gated else 1
        weights = TensorDescriptor(
            weight_PWK,
            [count, parts, units, size],
            [width * size, strides[1] * size, strides[0] * size, 1],
            [1, parts, tile.columns, tile.depth],
        )
        described_kernel[columns, blocks.count](
            x_XK, weights, *given, PARTS=parts, HALVES=tile.halves, **constants
        )
    else:
        whole_kernel[blocks.count, columns](
            x_XK, weight_PWK, *given, GATED=epilogue.gated, **constants, **overlap_options()
        )
    return output_SN


def describable(x_XK: Tensor, weight_PWK: Tensor) -> bool:
    """Return whether a descriptor can say where these weights lie, and what it loads is multiplied
    as it is."""
    return (
        x_XK.dtype == weight_PWK.dtype
        and x_XK.dtype.itemsize == 2
        and weight_PWK.shape[-1] % 8 == 0
        and weight_PWK.data_ptr() % 16 == 0
        and weight_PWK.numel() > 0
        and _has_descriptors(x_XK.device)
    )


@cache
def _has_descriptors(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)
