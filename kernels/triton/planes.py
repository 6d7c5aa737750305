"""Products with bit planes on NVIDIA GPUs, from the arrangement of kernels/planes.py for CUDA.

Each expert has a precision of its own, and only the planes it has are read and decoded. Codes
become whole numbers in registers, which bf16 and float16 hold exactly; each scale group is summed
and then multiplied by its scale in float32, so no weight is rounded. Activations keep their dtype
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

from kernels.planes import CHUNK_COLUMNS, PLANE_BITS, PlaneLayout
from kernels.triton.language import (
    Epilogue,
    activate,
    block_slots,
    compute_type,
)
from kernels.triton.routing import Blocks
from kernels.triton.tiles import Tile

_ALIGNMENT = 16  # bytes
_MOST_SPLITS = 8
_SPLIT_GROUPS = 8  # scale groups that a part has at least
_FULL_COLUMNS = 256  # blocks of columns that fill a GPU without a split
_SPLIT_BYTES = 16 << 20  # that the sums of all parts may take
_UNITS = 256  # of a program of `finish_kernel`
_ROWS_A_PROGRAM = 64  # of `dequantize_kernel`


@triton.jit
def pair_of(word, P: tl.constexpr, CENTRE: tl.constexpr, COMPUTE: tl.constexpr):
    """``2 * nibble + CENTRE`` of the columns ``8 P + 2 u`` and the next, u along words: (N, 4, 2).

    The bits of a bf16 are those of 128 and of a whole number below 128, or of a float16 those of
    1024 and one below 1024: no conversion is needed.
    """
    own = (word << 1 if P == 0 else word >> (4 * P - 1)) & 0x001E001E
    if tl.float32 == COMPUTE:
        own = own | (CENTRE * 0x00010001)
        low, high = (own & 0xFFFF).to(tl.float32), (own >> 16).to(tl.float32)
    else:
        if tl.bfloat16 == COMPUTE:
            own = own | (0x43004300 + CENTRE * 0x00010001)
        else:
            own = own | (0x64006400 + CENTRE * 0x00010001)
        low = (own & 0xFFFF).to(tl.int16).to(COMPUTE, bitcast=True)
        high = (own >> 16).to(tl.int16).to(COMPUTE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def doubled(word, CENTRE: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr):
    """(COLUMNS, 32) whole numbers ``2 * (nibble - 8) + CENTRE`` of (COLUMNS, 4) words."""
    early = tl.join(pair_of(word, 0, CENTRE, COMPUTE), pair_of(word, 1, CENTRE, COMPUTE))
    late = tl.join(pair_of(word, 2, CENTRE, COMPUTE), pair_of(word, 3, CENTRE, COMPUTE))
    numbers = tl.permute(tl.join(early, late), (0, 4, 3, 1, 2))
    numbers = tl.reshape(numbers, (COLUMNS, 32))
    if tl.float32 == COMPUTE:
        numbers -= 16.0
    elif tl.bfloat16 == COMPUTE:
        numbers -= 144.0
    else:
        numbers -= 1040.0
    return numbers


@triton.jit
def words_of_rows(plane, chunk, inside, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """(COLUMNS, 4) words of a plane: of each row and u, the word that holds its bits.

    Args:
        chunk, inside: (COLUMNS / 16,) each block's chunk, and whether it is wanted.
        WORDS: of two rows, q and ``8 + q``: 4 of 2 bits, 2 of 1 bit.
    """
    BLOCKS: tl.constexpr = COLUMNS // 16
    pair = chunk[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    at = pair * WORDS + tl.arange(0, WORDS)[None, None, :]
    words = tl.load(plane + at, mask=inside[:, None, None], other=0)
    SHARED: tl.constexpr = 4 // WORDS
    spread = tl.broadcast_to(words[:, None, :, :, None], (BLOCKS, 2, 8, WORDS, SHARED))
    return tl.reshape(spread, (COLUMNS, 4))


@triton.jit
def chunk_numbers(
    plane0, plane1, plane2, plane3, chunk, inside,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(COLUMNS, 32) whole numbers of one chunk: ``code - 136`` of 8 bits, else an eighth of it.

    Missing bits stand for the middle of the codes that begin with the others.

    Args:
        chunk, inside: (COLUMNS / 16,) each block's chunk, and whether it is wanted.
    """
    late = (tl.arange(0, COLUMNS) // 8 % 2).to(tl.uint32)[:, None]  # the second row of two
    odd = (tl.arange(0, 4) % 2).to(tl.uint32)[None, :]
    nibble = words_of_rows(plane0, chunk, inside, 4, COLUMNS) << (2 - 2 * late)
    nibble &= 0xCCCCCCCC
    if PLANES >= 2:
        bits = words_of_rows(plane1, chunk, inside, 2, COLUMNS) >> (odd + 2 * late)
        nibble |= (bits & 0x11111111) << 1
    if PLANES >= 3:
        bits = words_of_rows(plane2, chunk, inside, 2, COLUMNS) >> (odd + 2 * late)
        nibble |= bits & 0x11111111
    if PLANES >= 3:
        numbers = doubled(nibble, 0, COMPUTE, COLUMNS)
    elif PLANES == 2:
        numbers = doubled(nibble, 1, COMPUTE, COLUMNS)
    else:
        numbers = doubled(nibble, 3, COMPUTE, COLUMNS)
    if PLANES == 4:
        pair = chunk[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
        at = pair * 8 + tl.arange(0, 4)[None, None, :, None] * 2
        at += tl.arange(0, 2)[None, None, None, :]
        low = tl.load(plane3 + at, mask=inside[:, None, None, None], other=0)
        low = tl.reshape(tl.permute(low, (0, 3, 1, 2)), (COLUMNS, 4))
        # 16 (high - 8) + (low - 8), all of it exact.
        numbers = numbers * 8.0 + doubled(low, 0, COMPUTE, COLUMNS) * 0.5
    return numbers


@triton.jit
def words_at(entry, PLANE: tl.constexpr):
    return tl.multiple_of(tl.load(entry + PLANE).to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def sum_splits(
    entry, from_x, used, begin, rows, inside, first, last, per_split, groups, N, K,
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
                chunk = begin // 16 + blocks * groups * CHUNKS + index
                numbers = chunk_numbers(
                    plane0, plane1, plane2, plane3, chunk, wanted, PLANES, COMPUTE, COLUMNS
                )
                rest = (depth < K - index * 32)[:, None]
                x = tl.load(from_x + index * 32, mask=used[None, :] & rest, other=0.0)
                dot = tl.dot(numbers, x.to(COMPUTE), dot, input_precision="ieee")
            at = begin // CHUNKS + (block * groups + group) * 16 + within
            scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
            if PLANES < 4:
                scale *= 8.0
            sums += dot * scale[:, None]
        total += sums
    return total


@triton.jit
def planes_kernel(
    x, table, output, order, offsets, block_expert, block_first,
    share, begin, part_rows, slots_in_all, width, N, K, groups, per_split, splits, apart,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """PLANES: that all experts have; 0 if they differ, or are not known."""
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < 0:
        return
    part, split = tl.program_id(2) // apart, tl.program_id(2) % apart
    slots, used = block_slots(order, offsets, expert, tl.load(block_first + tl.program_id(0)), ROWS)
    entry = table + expert * 5
    rows = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < N
    from_x = x + (slots // share).to(tl.int64)[None, :] * K + tl.arange(0, 32)[:, None]
    start = begin + part * part_rows
    last = split + 1
    if apart == 1:
        last = splits
    if PLANES > 0:
        sums = sum_splits(
            entry, from_x, used, start, rows, inside, split, last, per_split, groups, N, K,
            PLANES, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 3) != 0:
        sums = sum_splits(
            entry, from_x, used, start, rows, inside, split, last, per_split, groups, N, K,
            4, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 2) != 0:
        sums = sum_splits(
            entry, from_x, used, start, rows, inside, split, last, per_split, groups, N, K,
            3, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 1) != 0:
        sums = sum_splits(
            entry, from_x, used, start, rows, inside, split, last, per_split, groups, N, K,
            2, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    else:
        sums = sum_splits(
            entry, from_x, used, start, rows, inside, split, last, per_split, groups, N, K,
            1, COMPUTE, ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    row = split * slots_in_all + slots
    to = output + row.to(tl.int64)[None, :] * width + (part * N + rows)[:, None]
    tl.store(to, sums, mask=used[None, :] & inside[:, None])


def splits(layout: PlaneLayout) -> tuple[int, int]:
    """Parts of K that are summed one after the other, and the scale groups of each.

    The number of rows does not matter, so that a row's bits do not depend on it.
    """
    wanted = _FULL_COLUMNS * 64 // max(layout.rows, 1)
    count = max(1, min(_MOST_SPLITS, wanted, layout.num_groups // _SPLIT_GROUPS))
    each = -(-layout.num_groups // count)
    return -(-layout.num_groups // each), each


def project_planes(
    x_XK: Tensor,
    table_E5: Tensor,
    layout: PlaneLayout,
    blocks: Blocks,
    tile: Tile,
    *,
    planes: int = 0,
    parts: int = 1,
    share: int = 1,
    before: int = 0,
) -> Tensor:
    """(splits, S, parts * N) float32 sums of all slots, part after part; for `finish`.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        table_E5: from `address_table`.
        layout: of one part, arranged for CUDA; each expert's parts lie one after the other.
        blocks: from `routing`, with blocks of ``tile.rows``.
        planes: that all experts have; 0 if they differ.
        before: codes of an expert that lie before its first part.
    """
    slots, width = blocks.order_S.shape[0], parts * layout.rows
    count, each = splits(layout)
    apart = count if count * slots * width * 4 <= _SPLIT_BYTES else 1
    sums_PSW = torch.empty(apart, slots, width, dtype=torch.float32, device=x_XK.device)
    grid = blocks.count, triton.cdiv(layout.rows, tile.columns), parts * apart
    codes = layout.padded_rows * layout.padded_columns
    planes_kernel[grid](
        x_XK, table_E5, sums_PSW,
        blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B,
        share, before // CHUNK_COLUMNS, codes // CHUNK_COLUMNS, slots, width,
        layout.rows, layout.columns, layout.num_groups, each, count, apart,
        PLANES=planes, COMPUTE=compute_type(x_XK.dtype),
        ROWS=tile.rows, COLUMNS=tile.columns, GROUP=layout.group_size, **tile.options,
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
    entry, output, begin, row, rows, inside, first, last_row, groups, K,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = GROUP // 32
    plane0, plane1 = words_at(entry, 0), words_at(entry, 1)
    plane2, plane3 = words_at(entry, 2), words_at(entry, 3)
    scales = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16)
    block = first // 16 + tl.arange(0, COLUMNS // 16)
    wanted = block * 16 < last_row
    group = tl.program_id(1)
    at_scale = begin // CHUNKS + (rows // 16 * groups + group) * 16 + rows % 16
    scale = tl.load(scales + at_scale, mask=inside, other=0.0).to(tl.float32)
    if PLANES < 4:
        scale *= 8.0
    for chunk in tl.static_range(CHUNKS):
        index = group * CHUNKS + chunk
        own = begin // 16 + block * groups * CHUNKS + index
        numbers = chunk_numbers(
            plane0, plane1, plane2, plane3, own, wanted, PLANES, COMPUTE, COLUMNS
        )
        weights = numbers.to(tl.float32) * scale[:, None]
        columns = index * 32 + tl.arange(0, 32)
        mask = inside[:, None] & (columns < K)[None, :]
        to = output + row[:, None] * K + columns[None, :]
        tl.store(to, weights.to(output.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    table, experts, output, first_row, begin, part_rows, width,
    unit_stride, part_stride, K, groups, last_row,
    COMPUTE: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    own, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    expert = tl.load(experts + own)
    if expert < 0:
        return
    entry = table + expert * 5
    first = first_row + tl.program_id(0) * COLUMNS
    rows = first + tl.arange(0, COLUMNS)
    inside = rows < last_row
    start = begin + part * part_rows
    row = own.to(tl.int64) * width + (rows - first_row) * unit_stride + part * part_stride
    if tl.load(entry + 3) != 0:
        dequantize_chunks(
            entry, output, start, row, rows, inside, first, last_row, groups, K,
            4, COMPUTE, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 2) != 0:
        dequantize_chunks(
            entry, output, start, row, rows, inside, first, last_row, groups, K,
            3, COMPUTE, COLUMNS, GROUP,
        )  # fmt: skip
    elif tl.load(entry + 1) != 0:
        dequantize_chunks(
            entry, output, start, row, rows, inside, first, last_row, groups, K,
            2, COMPUTE, COLUMNS, GROUP,
        )  # fmt: skip
    else:
        dequantize_chunks(
            entry, output, start, row, rows, inside, first, last_row, groups, K,
            1, COMPUTE, COLUMNS, GROUP,
        )  # fmt: skip


def dequantized(
    table_E5: Tensor,
    layout: PlaneLayout,
    dtype: torch.dtype,
    expert_P: Tensor,
    *,
    rows: range | None = None,
    epilogue: Epilogue | None = None,
    before: int = 0,
) -> Tensor:
    """(P, parts * rows, K) weights in `dtype`, in the order of the projection.

    Args:
        expert_P: int32; the place of a negative one holds junk.
        rows: of a matrix of one part, from a multiple of 16 on; None for all.
        epilogue: says how parts lie in the projection.
        before: codes of an expert that lie before its first part.
    """
    epilogue = Epilogue() if epilogue is None else epilogue
    rows = range(layout.rows) if rows is None else rows
    width = epilogue.parts * len(rows)
    output = torch.empty(len(expert_P), width, layout.columns, dtype=dtype, device=table_E5.device)
    programs = triton.cdiv(len(rows), _ROWS_A_PROGRAM)
    codes = layout.padded_rows * layout.padded_columns
    dequantize_kernel[programs, layout.num_groups, len(expert_P) * epilogue.parts](
        table_E5, expert_P, output, rows.start, before // CHUNK_COLUMNS,
        codes // CHUNK_COLUMNS, width, *epilogue.strides(len(rows)),
        layout.columns, layout.num_groups, rows.stop,
        COMPUTE=compute_type(dtype), COLUMNS=_ROWS_A_PROGRAM, GROUP=layout.group_size,
        PARTS=epilogue.parts, enable_fp_fusion=False,
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
            if BITS == 4:
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
