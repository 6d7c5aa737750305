"""Products with bit planes on NVIDIA GPUs, from the arrangement of kernels/planes.py for CUDA.

Each expert has a precision of its own, and only the planes it has are read and decoded. Codes
become whole numbers in registers (kernels/triton/codes.py); each scale group is summed and then
multiplied by its scale in float32, so no weight is rounded. Activations keep their dtype
on the GPU, while the CPU quantises them (kernels/reference.py): the results differ by that.

A few rows do not fill a GPU, so K is split (`splits`): as many parts as the matrix alone decides,
summed one after the other, whether each part has a program of its own (`project_planes`, then
`finish`) or one program sums all. So a row's bits depend on its own input only.

Many rows read `dequantized` weights instead, rounded to the activations' dtype once, because
decoding them again for every block of rows would cost more than writing them down.

Weights are the first operand of the matrix instructions, and codes reach it from registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.planes import CHUNK_COLUMNS, PlaneLayout
from kernels.scales import SCALES
from kernels.scales import block_bytes as scale_bytes
from kernels.triton.codes import (
    FP8,
    OFFSET,
    SUPER_OFFSET,
    chunk_numbers,
    file_numbers,
    float_numbers,
    group_scale,
    words_at,
)
from kernels.triton.language import (
    Epilogue,
    activate,
    block_slots,
    compute_type,
    masked_by,
)
from kernels.triton.routing import Blocks
from kernels.triton.tiles import Tile

_ALIGNMENT = 16  # bytes
_MOST_PLANES = 4
_MOST_SPLITS = 8
_SPLIT_UNITS = 8  # that a part has at least
_FULL_COLUMNS = 256  # blocks of columns that fill a GPU without a split
_SPLIT_BYTES = 16 << 20  # that the sums of all parts may take
_UNITS = 256  # of a program of `finish_kernel`
_ROWS_A_PROGRAM = 64  # of `dequantize_kernel`


@triton.jit
def sum_splits(
    entry, from_x, used, rows, inside, first, last, per_split, groups, N, K,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(COLUMNS, ROWS) float32: the parts from `first` to `last` of K, one after the other."""
    CHUNKS: tl.constexpr = GROUP // 32
    plane0, plane1 = words_at(entry, 0), words_at(entry, 1)
    plane2, plane3 = words_at(entry, 2), words_at(entry, 3)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16)
    block, within = rows // 16, rows % 16
    blocks = tl.program_id(1) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    wanted = blocks * 16 < N
    depth = tl.arange(0, 32)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for split in range(first, last):
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for group in range(split * per_split, tl.minimum((split + 1) * per_split, groups)):
            dot = tl.zeros((COLUMNS, ROWS), tl.float32)
            for chunk in tl.static_range(CHUNKS):
                index = group * CHUNKS + chunk
                chunk = blocks * groups * CHUNKS + index
                numbers = chunk_numbers(
                    plane0, plane1, plane2, plane3, chunk, wanted, PLANES, COMPUTE, COLUMNS
                )
                rest = (depth < K - index * 32)[:, None]
                x = tl.load(from_x + index * 32, mask=used[None, :] & rest, other=0.0)
                dot = tl.dot(numbers, x.to(COMPUTE), dot, input_precision="ieee")
            at = (block * groups + group) * 16 + within
            scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
            if PLANES < 4:
                scale *= 8.0
            sums += dot * scale[:, None]
        total += sums
    return total


@triton.jit
def sum_file_splits(
    entry, from_x, used, rows, inside, first, last, per_split, units, chunks, block_bytes, N, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As `sum_splits`, of codes that a file had quantised.

    Offsets count as often as the sum of a group's activations says. A product with ones gives it
    where it is needed: matrix instructions have time.
    """
    CHUNKS: tl.constexpr = GROUP // 32 if GROUP > 32 else 1
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1
    ADDS: tl.constexpr = KIND == OFFSET or (KIND >= SUPER_OFFSET and KIND < FP8)
    plane0, plane1 = words_at(entry, 0), words_at(entry, 1)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.uint8)), 16)
    block, within = rows // 16, rows % 16
    blocks = tl.program_id(1) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    depth = tl.arange(0, 32)
    ones = tl.full((COLUMNS, 32), 1.0, COMPUTE)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for split in range(first, last):
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for unit in range(split * per_split, tl.minimum((split + 1) * per_split, units)):
            for half in tl.static_range(HALVES):
                dot = tl.zeros((COLUMNS, ROWS), tl.float32)
                whole = tl.zeros((COLUMNS, ROWS), tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    index = unit * CHUNKS + chunk
                    # The last group may be short.
                    wanted = masked_by(blocks * 16 < N, index < chunks)
                    own = blocks * chunks + index
                    if KIND >= FP8:
                        numbers = float_numbers(plane0, own, wanted, BITS, COMPUTE, COLUMNS)
                    else:
                        numbers = file_numbers(
                            plane0, plane1, own, wanted, BITS, PLANES, COMPUTE, COLUMNS
                        )
                    rest = (depth < K - index * 32)[:, None]
                    x = tl.load(from_x + index * 32, mask=used[None, :] & rest, other=0.0)
                    if HALVES == 2:
                        x = tl.where((depth // 16 == half)[:, None], x, 0.0)
                    x = x.to(COMPUTE)
                    dot = tl.dot(numbers, x, dot, input_precision="ieee")
                    if ADDS:
                        whole = tl.dot(ones, x, whole, input_precision="ieee")
                scale, least = group_scale(
                    scales, block, within, unit * HALVES + half, inside, block_bytes,
                    BITS, KIND, GROUP,
                )  # fmt: skip
                sums += dot * scale[:, None]
                if ADDS:
                    sums += whole * least[:, None]
        total += sums
    return total


@triton.jit
def planes_kernel(
    x, table, output, order, offsets, block_expert, block_first,
    share, slots_in_all, parts, width, N, K, units, chunks, per_split, splits, apart, block_bytes,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """PLANES: that all experts have; 0 if they differ, or are not known."""
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < 0:
        return
    part, split = tl.program_id(2) // apart, tl.program_id(2) % apart
    slots, used = block_slots(order, offsets, expert, tl.load(block_first + tl.program_id(0)), ROWS)
    entry = table + (expert * parts + part) * 5
    rows = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < N
    from_x = x + (slots // share).to(tl.int64)[None, :] * K + tl.arange(0, 32)[:, None]
    last = split + 1
    if apart == 1:
        last = splits
    if KIND > 0:
        if PLANES > 0:
            sums = sum_file_splits(
                entry, from_x, used, rows, inside, split, last, per_split, units, chunks,
                block_bytes, N, K, BITS, KIND, PLANES, COMPUTE, ROWS, COLUMNS, GROUP,
            )  # fmt: skip
        elif tl.load(entry + 1) != 0:
            sums = sum_file_splits(
                entry, from_x, used, rows, inside, split, last, per_split, units, chunks,
                block_bytes, N, K, BITS, KIND, 2, COMPUTE, ROWS, COLUMNS, GROUP,
            )  # fmt: skip
        else:
            sums = sum_file_splits(
                entry, from_x, used, rows, inside, split, last, per_split, units, chunks,
                block_bytes, N, K, BITS, KIND, 1, COMPUTE, ROWS, COLUMNS, GROUP,
            )  # fmt: skip
    elif PLANES > 0:
        sums = sum_splits(
            entry, from_x, used, rows, inside, split, last, per_split, units, N, K,
            PLANES, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 3) != 0:
        sums = sum_splits(
            entry, from_x, used, rows, inside, split, last, per_split, units, N, K,
            4, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 2) != 0:
        sums = sum_splits(
            entry, from_x, used, rows, inside, split, last, per_split, units, N, K,
            3, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 1) != 0:
        sums = sum_splits(
            entry, from_x, used, rows, inside, split, last, per_split, units, N, K,
            2, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    else:
        sums = sum_splits(
            entry, from_x, used, rows, inside, split, last, per_split, units, N, K,
            1, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    row = split * slots_in_all + slots
    to = output + row.to(tl.int64)[None, :] * width + (part * N + rows)[:, None]
    tl.store(to, sums, mask=used[None, :] & inside[:, None])


def splits(layout: PlaneLayout) -> tuple[int, int]:
    """Parts of K that are summed one after the other, and the units of each: scale groups, or
    chunks where these are larger.

    The number of rows does not matter, so that a row's bits do not depend on it.
    """
    units, wanted = _units(layout), _FULL_COLUMNS * 64 // max(layout.rows, 1)
    count = max(1, min(_MOST_SPLITS, wanted, units // _SPLIT_UNITS))
    each = -(-units // count)
    return -(-units // each), each


def _units(layout: PlaneLayout) -> int:
    return layout.num_groups if layout.group_size >= CHUNK_COLUMNS else _chunks(layout)


def _chunks(layout: PlaneLayout) -> int:
    return layout.padded_columns // CHUNK_COLUMNS


def _constants(layout: PlaneLayout) -> dict[str, int]:
    """What every launch is compiled for."""
    kind = SCALES.index(layout.scales)
    return {"BITS": layout.bits, "KIND": kind, "GROUP": layout.group_size}


def _block_bytes(layout: PlaneLayout) -> int:
    return scale_bytes(layout.scales, layout.columns, layout.group_size)


def project_planes(
    x_XK: Tensor,
    table_EP5: Tensor,
    layout: PlaneLayout,
    blocks: Blocks,
    tile: Tile,
    *,
    planes: int = 0,
    share: int = 1,
) -> Tensor:
    """(splits, S, parts * N) float32 sums of all slots, part after part; for `finish`.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        table_EP5: from `address_table`.
        layout: of one part, arranged for CUDA.
        blocks: from `routing`, with blocks of ``tile.rows``.
        planes: that all experts have; 0 if they differ.
    """
    parts = table_EP5.shape[1]
    slots, width = blocks.order_S.shape[0], parts * layout.rows
    count, each = splits(layout)
    apart = count if count * slots * width * 4 <= _SPLIT_BYTES else 1
    sums_PSW = torch.empty(apart, slots, width, dtype=torch.float32, device=x_XK.device)
    grid = blocks.count, triton.cdiv(layout.rows, tile.columns), parts * apart
    planes_kernel[grid](
        x_XK, table_EP5, sums_PSW,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, slots, parts, width, layout.rows, layout.columns, _units(layout),
        _chunks(layout), each, count, apart, _block_bytes(layout),
        PLANES=min(planes, len(layout.format.plane_bits)), COMPUTE=compute_type(x_XK.dtype),
        ROWS=tile.rows, COLUMNS=tile.columns, **_constants(layout), **tile.options,
    )  # fmt: skip
    return sums_PSW


@triton.jit
def finish_kernel(
    sums, bias, ids, output, experts, splits, slots_in_all, width, N,
    unit_stride, part_stride, slope, limit, offset,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_IDS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    expert = 0
    if HAS_IDS:
        expert = tl.load(ids + slot)
        if (expert < 0) | (expert >= experts):
            return
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = units < N
    at = sums + slot * width + part * N + units
    own = tl.zeros((UNITS,), tl.float32)
    up = own
    for split in range(0, splits):
        own += tl.load(at + split * slots_in_all * width, mask=inside, other=0.0)
        if GATED:
            up += tl.load(at + split * slots_in_all * width + N, mask=inside, other=0.0)
    columns = units * unit_stride + part * part_stride
    if HAS_BIAS:
        from_bias = bias + expert * width + columns
        own += tl.load(from_bias, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(from_bias + part_stride, mask=inside, other=0.0).to(tl.float32)
    if CURVE >= 0:
        own = activate(own, up, slope, limit, offset, CURVE, GATED)
        to = output + slot * N + units
    else:
        to = output + slot * width + columns
    tl.store(to, own.to(output.dtype.element_ty), mask=inside)


def finish(
    sums_PSW: Tensor,
    bias_EW: Tensor | None,
    ids_S: Tensor | None,
    dtype: torch.dtype,
    *,
    experts: int = 1,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """(S, W) in `dtype`, or (S, W / parts) of a known activation: sums of all splits, with bias.

    Args:
        sums_PSW: from `project_planes`.
        bias_EW: contiguous, in the order of the projection; or None.
        ids_S: contiguous, each slot's expert; None: all have the only one. Rows of slots without
            an expert hold junk.
        epilogue: for a first projection.
    """
    epilogue = Epilogue() if epilogue is None else epilogue
    count, slots, width = sums_PSW.shape
    units, known = width // epilogue.parts, epilogue.activation is not None
    output_SN = torch.empty(slots, units if known else width, dtype=dtype, device=sums_PSW.device)
    finish_kernel[slots, triton.cdiv(units, _UNITS), 1 if known else epilogue.parts](
        sums_PSW, bias_EW, ids_S, output_SN, experts, count, slots, width, units,
        *epilogue.strides(units), *epilogue.numbers,
        CURVE=epilogue.curve, GATED=epilogue.gated, HAS_BIAS=bias_EW is not None,
        HAS_IDS=ids_S is not None, UNITS=_UNITS, enable_fp_fusion=False,
    )  # fmt: skip
    return output_SN


@triton.jit
def dequantize_chunks(
    entry, output, row, rows, inside, first, last_row, groups, K,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = GROUP // 32
    plane0, plane1 = words_at(entry, 0), words_at(entry, 1)
    plane2, plane3 = words_at(entry, 2), words_at(entry, 3)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16)
    block = first // 16 + tl.arange(0, COLUMNS // 16)
    wanted = block * 16 < last_row
    group = tl.program_id(1)
    at_scale = (rows // 16 * groups + group) * 16 + rows % 16
    scale = tl.load(scales + at_scale, mask=inside, other=0.0).to(tl.float32)
    if PLANES < 4:
        scale *= 8.0
    for chunk in tl.static_range(CHUNKS):
        index = group * CHUNKS + chunk
        own = block * groups * CHUNKS + index
        numbers = chunk_numbers(
            plane0, plane1, plane2, plane3, own, wanted, PLANES, COMPUTE, COLUMNS
        )
        weights = numbers.to(tl.float32) * scale[:, None]
        columns = index * 32 + tl.arange(0, 32)
        mask = inside[:, None] & (columns < K)[None, :]
        to = output + row[:, None] * K + columns[None, :]
        tl.store(to, weights.to(output.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_file_chunk(
    entry, output, row, rows, inside, first, last_row, chunks, block_bytes, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    plane0, plane1 = words_at(entry, 0), words_at(entry, 1)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.uint8)), 16)
    block = first // 16 + tl.arange(0, COLUMNS // 16)
    index = tl.program_id(1)
    own = block * chunks + index
    wanted = block * 16 < last_row
    if KIND >= FP8:
        numbers = float_numbers(plane0, own, wanted, BITS, COMPUTE, COLUMNS)
    else:
        numbers = file_numbers(plane0, plane1, own, wanted, BITS, PLANES, COMPUTE, COLUMNS)
    numbers = numbers.to(tl.float32)
    group = index * 32 // GROUP
    scale, least = group_scale(
        scales, rows // 16, rows % 16, group, inside, block_bytes, BITS, KIND, GROUP
    )
    weights = numbers * scale[:, None] + least[:, None]
    depth = tl.arange(0, 32)
    if GROUP == 16:
        scale, least = group_scale(
            scales, rows // 16, rows % 16, group + 1, inside, block_bytes, BITS, KIND, GROUP
        )
        late = numbers * scale[:, None] + least[:, None]
        weights = tl.where((depth < 16)[None, :], weights, late)
    columns = index * 32 + depth
    mask = inside[:, None] & (columns < K)[None, :]
    to = output + row[:, None] * K + columns[None, :]
    tl.store(to, weights.to(output.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    table, experts, output, first_row, width, unit_stride, part_stride, K, units, last_row,
    block_bytes, BITS: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    own, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    expert = tl.load(experts + own)
    if expert < 0:
        return
    entry = table + (expert * PARTS + part) * 5
    first = first_row + tl.program_id(0) * COLUMNS
    rows = first + tl.arange(0, COLUMNS)
    inside = rows < last_row
    row = own.to(tl.int64) * width + (rows - first_row) * unit_stride + part * part_stride
    if KIND > 0:
        if tl.load(entry + 1) != 0:
            dequantize_file_chunk(
                entry, output, row, rows, inside, first, last_row, units, block_bytes, K,
                BITS, KIND, 2, COMPUTE, COLUMNS, GROUP,
            )  # fmt: skip
        else:
            dequantize_file_chunk(
                entry, output, row, rows, inside, first, last_row, units, block_bytes, K,
                BITS, KIND, 1, COMPUTE, COLUMNS, GROUP,
            )  # fmt: skip
    elif tl.load(entry + 3) != 0:
        dequantize_chunks(
            entry, output, row, rows, inside, first, last_row, units, K, 4, COMPUTE, COLUMNS, GROUP
        )
    elif tl.load(entry + 2) != 0:
        dequantize_chunks(
            entry, output, row, rows, inside, first, last_row, units, K, 3, COMPUTE, COLUMNS, GROUP
        )
    elif tl.load(entry + 1) != 0:
        dequantize_chunks(
            entry, output, row, rows, inside, first, last_row, units, K, 2, COMPUTE, COLUMNS, GROUP
        )
    else:
        dequantize_chunks(
            entry, output, row, rows, inside, first, last_row, units, K, 1, COMPUTE, COLUMNS, GROUP
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
    programs = triton.cdiv(len(rows), _ROWS_A_PROGRAM)
    units = layout.num_groups if layout.scales == "symmetric" else _chunks(layout)
    dequantize_kernel[programs, units, len(expert_P) * epilogue.parts](
        table_EP5, expert_P, output, rows.start, width, *epilogue.strides(len(rows)),
        layout.columns, units, rows.stop, _block_bytes(layout),
        COMPUTE=compute_type(dtype), COLUMNS=_ROWS_A_PROGRAM, PARTS=epilogue.parts,
        **_constants(layout), enable_fp_fusion=False,
    )  # fmt: skip
    return output


@triton.jit
def arrange_kernel(source, target, pairs, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """The arrangement for CUDA of a plane; a program has PAIRS pairs of rows of a chunk."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    word = tl.arange(0, 2 * BITS)
    STEPS: tl.constexpr = 8 // BITS
    result = tl.zeros((PAIRS, 2 * BITS), tl.uint32)
    for late in tl.static_range(2):
        for column in tl.static_range(32):
            step = column // 4
            index = step % STEPS
            u = column % 8 // 2
            bit = 4 * (column // 8) + 16 * (column % 2)
            if BITS == 8:
                position = 0
                own = 4 * u + 2 * (column // 16) + late
                bit = 8 * (column // 8 % 2) + 16 * (column % 2)
            elif BITS == 4:
                position = 4 * index
                own = 2 * u + late
            elif BITS == 2:
                position = 6 - 2 * index
                own = u
                bit += 2 * late
            else:
                position = 7 - 2 * (index % 4) - index // 4
                own = u // 2
                bit += u % 2 + 2 * late
            from_word = (pair // 8 * BITS + step // STEPS) * 16 + pair % 8 + 8 * late
            value = tl.load(source + from_word, mask=inside, other=0)
            code = (value >> (position + 8 * (column % 4))) & ((1 << BITS) - 1)
            result |= tl.where((word == own)[None, :], (code << bit)[:, None], 0)
    at = pair.to(tl.int64)[:, None] * (2 * BITS) + word[None, :]
    tl.store(target + at, result, mask=inside[:, None])


def arrange(source: Tensor, target: Tensor, bits: int) -> None:
    """Write a plane, or blobs that join several, arranged for CUDA; both ``(bytes,)`` uint8."""
    pairs = source.numel() // (8 * bits)
    arrange_kernel[(triton.cdiv(pairs, 64),)](
        source.view(torch.uint32),
        target.view(torch.uint32),
        pairs,
        BITS=bits,
        PAIRS=64,
        enable_fp_fusion=False,
    )


def address_table(
    planes: Sequence[tuple[Tensor, ...]],
    scales: Sequence[Tensor],
    layouts: Sequence[PlaneLayout],
    own: range,
    device: torch.device,
) -> Tensor:
    """(E, P, 5) int64: where the planes (0: there is none) and the scales begin.

    Args:
        planes, scales: blobs of each expert.
        layouts: of the matrices that lie one after the other in a blob.
        own: the P matrices that are wanted.
    """
    rows = []
    for blobs, scale in zip(planes, scales, strict=True):
        for index in own:
            before = layouts[:index]
            held = layouts[index].format.plane_bits
            entry = [
                blobs[plane].data_ptr() + sum(layout.plane_bytes(plane) for layout in before)
                if plane < min(len(blobs), len(held))
                else 0
                for plane in range(_MOST_PLANES)
            ]
            rows.append([*entry, scale.data_ptr() + sum(x.scale_bytes for x in before)])
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return table.view(len(scales), len(own), _MOST_PLANES + 1)


def readable(blobs: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the kernels can read the blobs as they lie: on the device, dense and aligned."""
    return all(
        blob.device == device and blob.is_contiguous() and blob.data_ptr() % _ALIGNMENT == 0
        for blob in blobs
    )
