"""Grouped projections ``output[slot] = x[slot // share] W[expert]^T``, whole or as bit planes.

Sums run along K in steps of a fixed depth and are never split between programs, so a row's bits
depend on its own input only. A known activation is fused (`Epilogue`): the gate and up rows of a
unit are summed side by side, and only the activation's output is written.

Bit planes: each expert has a precision of its own. Codes become integers in registers,
``code - 136``, which bf16 and float16 hold exactly; each scale group is summed and then multiplied
by its scale in float32, so no weight is rounded. Activations keep their dtype on the GPU, while the
CPU quantises them (kernels/reference.py): the results differ by that rounding. A plane is read as
32-bit words: word ``(block * vectors + vector) * 16 + row`` holds one row's bits of a 64-byte
vector, 4 columns of each of its steps; neighbouring threads read neighbouring words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.planes import PLANE_BITS, ZERO_CODE, PlaneLayout
from kernels.triton.language import (
    Epilogue,
    activate,
    add_bias,
    block_slots,
    compute_type,
    masked_by,
)
from kernels.triton.routing import Blocks
from kernels.triton.tiles import Tile

_DEPTH = 64
_ALIGNMENT = 16  # bytes
_WORD_CODES = 16  # of a 2-bit plane
_NO_EPILOGUE = Epilogue()
_ZERO = tl.constexpr(ZERO_CODE)


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


def project_whole(
    x_XK: Tensor,
    weight_EWK: Tensor,
    bias_EW: Tensor | None,
    blocks: Blocks,
    tile: Tile,
    *,
    share: int = 1,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Rows of all slots in x's dtype: (S, W), or (S, W / parts) of a known activation.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        weight_EWK: contiguous.
        bias_EW: contiguous, or None.
        blocks: from `routing`, with blocks of ``tile.rows``.
        epilogue: for a first projection.
    """
    width, size = weight_EWK.shape[1:]
    if epilogue is None or epilogue.activation is None:
        epilogue = _NO_EPILOGUE
    units = width // epilogue.parts
    output_SN = torch.empty(blocks.order_S.shape[0], units, dtype=x_XK.dtype, device=x_XK.device)
    whole_kernel[blocks.count, triton.cdiv(units, tile.columns)](
        x_XK, weight_EWK, bias_EW, output_SN,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, *epilogue.strides(units), width, units, size, *epilogue.numbers,
        CURVE=epilogue.curve, GATED=epilogue.gated, HAS_BIAS=bias_EW is not None,
        COMPUTE=compute_type(x_XK.dtype, weight_EWK.dtype),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=_DEPTH, **tile.options,
    )  # fmt: skip
    return output_SN


@triton.jit
def plane_bits(
    plane, before, rows, group, groups, wanted, GROUP: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """(rows, GROUP) int32: one plane's bits of a scale group; 0 where not wanted, nothing read."""
    STEPS: tl.constexpr = 8 // BITS
    WORDS: tl.constexpr = GROUP // (4 * STEPS)
    vector = group * WORDS + tl.arange(0, WORDS)
    block = (rows // 16) * (groups * WORDS)
    at = before * 4 // STEPS + (block[:, None] + vector[None, :]) * 16 + (rows % 16)[:, None]
    word = tl.load(plane + at, mask=wanted[:, None], other=0)
    step = tl.arange(0, STEPS)
    # The first step lies in the highest bits, but in the lowest of the 4-bit plane. The last steps
    # of a 1-bit plane lie between the first ones.
    if BITS == 4:
        position = 4 * step
    elif BITS == 2:
        position = 6 - 2 * step
    else:
        position = 7 - 2 * (step % 4) - step // 4
    shift = position[:, None] + 8 * tl.arange(0, 4)[None, :]
    bits = (word[:, :, None, None] >> shift[None, None, :, :]) & ((1 << BITS) - 1)
    return tl.reshape(bits, (rows.shape[0], GROUP))


@triton.jit
def add_group(
    sums, x_tile, entry, before, rows, inside, group, groups,
    GROUP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``sums`` plus one scale group's share: x times its whole numbers, times its scales."""
    address1, address2, address3 = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    plane0 = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
    plane1 = tl.multiple_of(address1.to(tl.pointer_type(tl.int32)), 16)
    plane2 = tl.multiple_of(address2.to(tl.pointer_type(tl.int32)), 16)
    plane3 = tl.multiple_of(address3.to(tl.pointer_type(tl.int32)), 16)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16)
    has1, has2, has3 = address1 != 0, address2 != 0, address3 != 0
    in1, in2, in3 = masked_by(inside, has1), masked_by(inside, has2), masked_by(inside, has3)
    code = plane_bits(plane0, before, rows, group, groups, inside, GROUP, 2) << 6
    code |= plane_bits(plane1, before, rows, group, groups, in1, GROUP, 1) << 5
    code |= plane_bits(plane2, before, rows, group, groups, in2, GROUP, 1) << 4
    code |= plane_bits(plane3, before, rows, group, groups, in3, GROUP, 4)
    # The bits of missing planes stand for the middle.
    centre = tl.where(has3, 0, tl.where(has2, 8, tl.where(has1, 16, 32)))
    number = tl.trans((code + (centre - _ZERO)).to(COMPUTE))
    at = before // (GROUP // 16) + (rows // 16 * groups + group) * 16 + rows % 16
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    return sums + tl.dot(x_tile, number, input_precision="ieee") * scale[None, :]


@triton.jit
def planes_kernel(
    x, table, bias, output, order, offsets, block_expert, block_first,
    share, before, part_words, unit_stride, part_stride, width,
    N, K, groups, slope, limit, offset,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    part = tl.program_id(2)
    slots, used = block_slots(order, offsets, expert, tl.load(block_first + block), ROWS)
    entry = table + expert * 5
    rows = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < N
    depth = tl.arange(0, GROUP)
    from_x = x + (slots // share).to(tl.int64)[:, None] * K + depth[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = sums
    begin = before + part * part_words
    for group in range(0, groups):
        x_mask = used[:, None] & (depth < K - group * GROUP)[None, :]
        x_tile = tl.load(from_x + group * GROUP, mask=x_mask, other=0.0).to(COMPUTE)
        sums = add_group(
            sums, x_tile, entry, begin, rows, inside, group, groups, GROUP, COMPUTE
        )  # fmt: skip
        if GATED:
            up = add_group(
                up, x_tile, entry, begin + part_words, rows, inside, group, groups, GROUP, COMPUTE
            )  # fmt: skip
    columns = rows * unit_stride + part * part_stride
    sums = add_bias(sums, bias, expert, columns, width, inside, HAS_BIAS)
    if GATED:
        up = add_bias(up, bias, expert, columns + part_stride, width, inside, HAS_BIAS)
    if CURVE >= 0:
        sums = activate(sums, up, slope, limit, offset, CURVE, GATED)
        to = output + slots.to(tl.int64)[:, None] * N + rows[None, :]
    else:
        to = output + slots.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, sums.to(output.dtype.element_ty), mask=used[:, None] & inside[None, :])


def project_planes(
    x_XK: Tensor,
    table_E5: Tensor,
    bias_EW: Tensor | None,
    layout: PlaneLayout,
    blocks: Blocks,
    tile: Tile,
    *,
    share: int = 1,
    before: int = 0,
    epilogue: Epilogue = _NO_EPILOGUE,
) -> Tensor:
    """Rows of all slots in x's dtype: (S, parts * N), or (S, N) of a known activation.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        table_E5: from `address_table`.
        bias_EW: (E, parts * N), contiguous, in the order of the projection; or None.
        layout: of one part; each expert's parts lie one after the other.
        blocks: from `routing`, with blocks of ``tile.rows``.
        before: codes of an expert that lie before its first part.
        epilogue: for a first projection.
    """
    width, units = epilogue.parts * layout.rows, layout.rows
    known = epilogue.activation is not None
    output_SN = torch.empty(
        blocks.order_S.shape[0], units if known else width, dtype=x_XK.dtype, device=x_XK.device
    )
    grid = blocks.count, triton.cdiv(units, tile.columns), 1 if known else epilogue.parts
    planes_kernel[grid](
        x_XK, table_E5, bias_EW, output_SN,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, before // _WORD_CODES, layout.padded_rows * layout.padded_columns // _WORD_CODES,
        *epilogue.strides(units), width, units, layout.columns, layout.num_groups,
        *epilogue.numbers,
        CURVE=epilogue.curve, GATED=epilogue.gated, HAS_BIAS=bias_EW is not None,
        COMPUTE=compute_type(x_XK.dtype),
        ROWS=tile.rows, COLUMNS=tile.columns, GROUP=layout.group_size, **tile.options,
    )  # fmt: skip
    return output_SN


def address_table(
    planes: Sequence[tuple[Tensor, ...]], scales: Sequence[Tensor], device: torch.device
) -> Tensor:
    """(E, 5) int64: where each expert's planes (0: it has none) and its scales begin."""
    rows = [
        [*(blob.data_ptr() for blob in own), *[0] * (len(PLANE_BITS) - len(own)), scale.data_ptr()]
        for own, scale in zip(planes, scales, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def readable(blobs: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the kernels can read the blobs as they lie: on the device, dense and aligned."""
    return all(
        blob.device == device and blob.is_contiguous() and blob.data_ptr() % _ALIGNMENT == 0
        for blob in blobs
    )
