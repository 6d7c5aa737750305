"""Products with bit planes on NVIDIA GPUs, from the arrangement of kernels/planes.py for CUDA.

Each expert has a precision of its own, and only the planes it has are read and decoded. Codes
become whole numbers in registers (kernels/triton/codes.py); each scale group is summed and then
multiplied by its scale in float32, so no weight is rounded. Activations keep their dtype
on the GPU, while the CPU quantises them (kernels/reference.py): the results differ by that.

A program has 16 outputs of a matrix, or 32, and each of its warps a part of K, so that a few rows
fill a GPU. The matrix alone decides the parts, and matrix instructions add 16 columns one after the
other whatever the number of rows: a row's bits depend on its own input only.

Many rows of experts are for kernels/triton/tall.py. Very many, and those whose codes that cannot
read, meet panels of weights (kernels/triton/dequantize.py).

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
    INTERPRETED,
    WIDTH,
    file_numbers,
    float_numbers,
    group_scale,
    has_offsets,
    less_middle,
    load_rows,
    load_words,
    offset_less_middle,
    outer_scale,
    symmetric_numbers,
)
from kernels.triton.language import (
    Epilogue,
    activate,
    block_slots,
    compute_type,
    overlap_options,
    wait_for_others,
)
from kernels.triton.routing import Blocks
from kernels.triton.tiles import UNIT_COLUMNS, PlaneTile

_ALIGNMENT = 16  # bytes
_MOST_PLANES = 4
Addresses = tuple[int, ...]
"""See `addresses_of`."""


@triton.jit
def addresses(entry):
    """Return the begins of a matrix's four planes and of its scales, from a row of
    `address_table`."""
    return (
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3),
        tl.load(entry + 4),
    )  # fmt: skip


@triton.jit
def words_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def plane_bases(begins, block, chunks, block_bytes, BITS: tl.constexpr, KIND: tl.constexpr):
    """Return the begins of a block of 16 rows in each plane, and in the scales' bytes."""
    before = tl.cast(block, tl.int64) * chunks * 16
    FIRST: tl.constexpr = BITS if KIND >= FP8 else (2 if KIND == 0 or BITS < 4 else 4)
    SECOND: tl.constexpr = 1 if KIND == 0 or BITS < 5 else BITS - 4
    plane0 = words_at(begins[0]) + before * FIRST
    plane1 = words_at(begins[1]) + before * SECOND
    plane2, plane3 = words_at(begins[2]) + before, words_at(begins[3]) + before * 4
    scales = tl.multiple_of(begins[4].to(tl.pointer_type(tl.uint8)), 16)
    return plane0, plane1, plane2, plane3, scales + tl.cast(block, tl.int64) * block_bytes


@triton.jit
def fetch(at, nbytes):
    """Ask for bytes to be brought to the L2 cache, by one thread; both are multiples of 16. Returns
    0."""
    if INTERPRETED:
        return 0
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""", "=r,l,r", [at.to(tl.int64), nbytes], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def fetch_block(
    begins, block, chunks, block_bytes,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """`fetch` all that `sum_units` reads of a block."""
    FIRST: tl.constexpr = BITS if KIND >= FP8 else (2 if KIND == 0 or BITS < 4 else 4)
    SECOND: tl.constexpr = 1 if KIND == 0 or BITS < 5 else BITS - 4
    bases = plane_bases(begins, block, chunks, block_bytes, BITS, KIND)
    asked = fetch(bases[0], chunks * (64 * FIRST))
    asked += fetch(bases[4], block_bytes)
    if PLANES >= 2:
        asked += fetch(bases[1], chunks * (64 * SECOND))
    if KIND == 0 and PLANES >= 3:
        asked += fetch(bases[2], chunks * 64)
    if KIND == 0 and PLANES >= 4:
        asked += fetch(bases[3], chunks * 256)
    return asked


@triton.jit
def fetch_blocks(
    begins, begins_b, block, N, chunks, block_bytes,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr,
    GATED: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """`fetch` what a program reads. Returns 0, to be added to what later addresses are made of:
    only so does the compiler keep those loads behind this."""
    if GATED:
        asked = fetch_block(begins, block, chunks, block_bytes, BITS, KIND, PLANES)
        asked += fetch_block(begins_b, block, chunks, block_bytes, BITS, KIND, PLANES)
    elif TWO:
        last = (N + 15) // 16 - 1
        first = tl.minimum(2 * block, last)
        asked = fetch_block(begins, first, chunks, block_bytes, BITS, KIND, PLANES)
        first = tl.minimum(2 * block + 1, last)
        asked += fetch_block(begins, first, chunks, block_bytes, BITS, KIND, PLANES)
    else:
        block = tl.minimum(block, (N + 15) // 16 - 1)
        asked = fetch_block(begins, block, chunks, block_bytes, BITS, KIND, PLANES)
    return asked


@triton.jit
def load_unit(
    bases, unit, wanted,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr, MASKED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Each thread's words of four planes, then scales and offsets of the groups of a unit: of its
    first half, of that one's last 16 columns, and likewise of the second half. What there is not is
    what came before. The unit is LATER units behind `unit`, a multiple of 4."""
    FIRST: tl.constexpr = BITS if KIND >= FP8 else (2 if KIND == 0 or BITS < 4 else 4)
    SECOND: tl.constexpr = 1 if KIND == 0 or BITS < 5 else BITS - 4
    chunk = 2 * unit
    words0 = load_words(bases[0], chunk, wanted, FIRST, TAIL, MASKED, 2 * LATER)
    words1, words2, words3 = words0, words0, words0
    if PLANES >= 2:
        words1 = load_words(bases[1], chunk, wanted, SECOND, TAIL, MASKED, 2 * LATER)
    if KIND == 0 and PLANES >= 3:
        words2 = load_words(bases[2], chunk, wanted, 1, TAIL, MASKED, 2 * LATER)
    if KIND == 0 and PLANES >= 4:
        words3 = load_words(bases[3], chunk, wanted, 4, TAIL, MASKED, 2 * LATER)
    group = unit * 64 // GROUP if GROUP >= 64 else unit * (64 // GROUP)
    MORE: tl.constexpr = LATER * 64 // GROUP
    outer = outer_scale(bases[4], group, wanted, KIND, GROUP, MASKED, MORE)
    scale0, least0 = group_scale(bases[4], outer, group, wanted, BITS, KIND, GROUP, MASKED, MORE)
    scale1, least1, scale2, least2, scale3, least3 = scale0, least0, scale0, least0, scale0, least0
    if GROUP == 16:
        scale1, least1 = group_scale(
            bases[4], outer, group + 1, wanted, BITS, KIND, GROUP, MASKED, MORE
        )
    if GROUP < 64 and not TAIL:
        group += 32 // GROUP
        scale2, least2 = group_scale(
            bases[4], outer, group, wanted, BITS, KIND, GROUP, MASKED, MORE
        )
        if GROUP == 16:
            scale3, least3 = group_scale(
                bases[4], outer, group + 1, wanted, BITS, KIND, GROUP, MASKED, MORE
            )
    return (
        words0, words1, words2, words3,
        scale0, least0, scale1, least1, scale2, least2, scale3, least3,
    )  # fmt: skip


@triton.jit
def numbers_of(
    own, T: tl.constexpr, PIECE: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(S, 16, 32) numbers of half a unit, of what `load_unit` returned."""
    if KIND == 0:
        return symmetric_numbers(own, T, PIECE, PLANES, COMPUTE, WIDTH)
    elif KIND >= FP8:
        return float_numbers(own[0], T, BITS, COMPUTE)
    else:
        return file_numbers(own, T, PIECE, BITS, PLANES, COMPUTE)


@triton.jit
def add_products(
    dot, own, x, T: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """`dot` and the products of half a unit: of each piece of the codes."""
    numbers = numbers_of(own, T, 0, BITS, KIND, PLANES, COMPUTE)
    dot = tl.dot(numbers, x, dot, input_precision="ieee")
    if (KIND == 0 and PLANES == 4) or (KIND > 0 and KIND < FP8 and BITS > 4 and PLANES == 2):
        numbers = numbers_of(own, T, 1, BITS, KIND, PLANES, COMPUTE)
        dot = tl.dot(numbers, x, dot, input_precision="ieee")
    return dot


@triton.jit
def row_sums(x, zero, COMPUTE: tl.constexpr):
    """``zero`` and the sums of (S, 32, ROWS) activations: (S, 16, ROWS), each 16 times.

    By a product with ones: matrix instructions have time.
    """
    S: tl.constexpr = zero.shape[0]
    half = tl.full((S, 16, 16), 1.0, COMPUTE)
    # Joined, so that Triton takes x as it lies for the product with codes.
    ones = tl.reshape(tl.join(half, half), (S, 16, 32))
    return tl.dot(ones, x, zero, input_precision="ieee")


@triton.jit
def group_sums(
    x, zero, KIND: tl.constexpr, COMPUTE: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """`row_sums` of each group of a unit, as often as codes need them; the others are junk.

    Args:
        x: from `load_all_rows`.
    """
    first, second, third, fourth = zero, zero, zero, zero
    if KIND < FP8:
        first = row_sums(x[0], zero, COMPUTE)
        if GROUP == 16:
            second = row_sums(x[1], zero, COMPUTE)
        if not TAIL:
            third = row_sums(x[2], first if GROUP >= 64 else zero, COMPUTE)
            if GROUP == 16:
                fourth = row_sums(x[3], zero, COMPUTE)
            if GROUP >= 64:
                first = third
    return first, second, third, fourth


@triton.jit
def first_sums(
    ones, BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr
):
    """Return the start of a group's sums: with no offset, what their middle has too much."""
    dot = tl.zeros_like(ones)
    if not has_offsets(KIND):
        dot = less_middle(dot, ones, BITS, KIND, PLANES, COMPUTE)
    return dot


@triton.jit
def add_group(
    sums, dot, ones, scale, least,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """`sums` and a group's. An offset and the middle are one number of a weight row and group, so
    that they cost one instruction a sum, not two."""
    sums += dot * scale[:, :, None]
    if has_offsets(KIND):
        least = offset_less_middle(least, scale, BITS, KIND, PLANES, COMPUTE)
        sums += ones * least[:, :, None]
    return sums


@triton.jit
def add_unit(
    sums, own, x, ones,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """`sums` and the products of one unit of each warp; each scale group is summed, and then
    multiplied by its scale. Offsets count as often as the sum of the group's activations says.

    Args:
        own: from `load_unit`.
        x: four times (S, 32, ROWS), from `load_all_rows`.
        ones: from `group_sums`.
    """
    for T in tl.static_range(1 if TAIL else 2):
        if T == 0 or GROUP < 64:
            dot = first_sums(ones[2 * T], BITS, KIND, PLANES, COMPUTE)
        dot = add_products(dot, own, x[2 * T], T, BITS, KIND, PLANES, COMPUTE)
        if GROUP < 64:
            sums = add_group(
                sums, dot, ones[2 * T], own[4 + 4 * T], own[5 + 4 * T], BITS, KIND, PLANES, COMPUTE
            )
        if GROUP == 16:
            dot = first_sums(ones[2 * T + 1], BITS, KIND, PLANES, COMPUTE)
            dot = add_products(dot, own, x[2 * T + 1], T, BITS, KIND, PLANES, COMPUTE)
            sums = add_group(
                sums, dot, ones[2 * T + 1], own[6 + 4 * T], own[7 + 4 * T],
                BITS, KIND, PLANES, COMPUTE,
            )  # fmt: skip
    if GROUP >= 64:
        sums = add_group(sums, dot, ones[0], own[4], own[5], BITS, KIND, PLANES, COMPUTE)
    return sums


@triton.jit
def load_all_rows(
    from_x, unit, K,
    COMPUTE: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """Activations of a unit's first half and of its second one; where groups have 16 columns, of
    the first and of the last 16 columns of each. The unit is LATER units behind `unit`."""
    HALF: tl.constexpr = 0 if GROUP == 16 else -1
    at = unit * 64
    MORE: tl.constexpr = LATER * 64
    x0 = load_rows(from_x, at, K, COMPUTE, HALF, MASKED, MORE)
    x1, x2, x3 = x0, x0, x0
    if GROUP == 16:
        x1 = load_rows(from_x, at, K, COMPUTE, 1, MASKED, MORE)
    if not TAIL:
        x2 = load_rows(from_x, at, K, COMPUTE, HALF, MASKED, MORE + 32)
        if GROUP == 16:
            x3 = load_rows(from_x, at, K, COMPUTE, 1, MASKED, MORE + 32)
    return x0, x1, x2, x3


@triton.jit
def load_units(
    bases, bases_b, unit, units,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    TWO: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """UNROLL times what `load_unit` returns, and with TWO as often that of another block."""
    own = ()
    for index in tl.static_range(UNROLL):
        wanted = unit + index * PARTS < units
        one = load_unit(
            bases, unit, wanted, BITS, KIND, PLANES, GROUP, False, MASKED, index * PARTS
        )
        own = own + (one,)  # type: ignore[assignment]
        if TWO:
            one = load_unit(
                bases_b, unit, wanted, BITS, KIND, PLANES, GROUP, False, MASKED, index * PARTS
            )
            own = own + (one,)  # type: ignore[assignment]
    return own


@triton.jit
def hold_loads():
    """Keep loads behind this point: ptxas begins all of a unit's at once otherwise, and registers
    overflow."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            bar.warp.sync 0xffffffff;
            mov.u32 $0, $1;
            }""", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def add_strips(
    sums, sums_b, own, own_b, from_x, unit, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, TWO: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """`add_unit` to the sums of each strip of rows, and with TWO to those of another block.

    While a strip is multiplied, the activations of the next one are on their way.
    """
    more, more_b = (), ()
    following = load_all_rows(from_x[0], unit, K, COMPUTE, GROUP, TAIL, MASKED, LATER)
    for strip in tl.static_range(len(from_x)):
        x = following
        if strip + 1 < len(from_x):
            hold_loads()
            following = load_all_rows(
                from_x[strip + 1], unit, K, COMPUTE, GROUP, TAIL, MASKED, LATER
            )
        ones = group_sums(x, tl.zeros_like(sums[strip]), KIND, COMPUTE, GROUP, TAIL)
        one = add_unit(sums[strip], own, x, ones, BITS, KIND, PLANES, COMPUTE, GROUP, TAIL)
        more = more + (one,)  # type: ignore[assignment]
        one = sums_b[strip]
        if TWO:
            one = add_unit(one, own_b, x, ones, BITS, KIND, PLANES, COMPUTE, GROUP, TAIL)
        more_b = more_b + (one,)  # type: ignore[assignment]
    return more, more_b


@triton.jit
def sum_units(
    begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Two times a tuple of (16, 8 or more) float32 for each strip of rows: products of a block,
    and with TWO of another one.

    A warp adds every unit number PARTS, whatever the tile; then its parts are added.
    """
    bases = plane_bases(begins, block, chunks, block_bytes, BITS, KIND)
    bases_b = plane_bases(begins_b, block_b, chunks, block_bytes, BITS, KIND)
    sums = ()
    for strip in tl.static_range(len(from_x)):
        zero = tl.zeros((PARTS, 16, 8 * from_x[strip].shape[1]), tl.float32)
        sums = sums + (zero,)  # type: ignore[assignment]
    sums_b = sums
    part = tl.arange(0, PARTS)
    units = chunks // 2
    MASKED: tl.constexpr = not EVEN
    EACH: tl.constexpr = 2 if TWO else 1
    steps = tl.cdiv(units, PARTS)
    if EVEN:
        tl.assume(steps >= UNROLL)
    for step in range(0, steps, UNROLL):
        unit = step * PARTS + part
        own = load_units(
            bases, bases_b, unit, units, BITS, KIND, PLANES, GROUP, TWO, PARTS, UNROLL, MASKED
        )
        for index in tl.static_range(UNROLL):
            sums, sums_b = add_strips(
                sums, sums_b, own[EACH * index], own[EACH * index + EACH - 1], from_x, unit, K,
                BITS, KIND, PLANES, COMPUTE, GROUP, TWO, False, MASKED, index * PARTS,
            )  # fmt: skip
    if TAIL:
        unit = units + part
        last = load_unit(bases, unit, part == 0, BITS, KIND, PLANES, GROUP, True, True, 0)
        last_b = last
        if TWO:
            last_b = load_unit(bases_b, unit, part == 0, BITS, KIND, PLANES, GROUP, True, True, 0)
        sums, sums_b = add_strips(
            sums, sums_b, last, last_b, from_x, unit, K,
            BITS, KIND, PLANES, COMPUTE, GROUP, TWO, True, True, 0,
        )  # fmt: skip
    all_sums, all_sums_b = (), ()
    for strip in tl.static_range(len(from_x)):
        all_sums = all_sums + (tl.sum(sums[strip], 0),)  # type: ignore[assignment]
        all_sums_b = all_sums_b + (tl.sum(sums_b[strip], 0),)  # type: ignore[assignment]
    return all_sums, all_sums_b


@triton.jit
def slots_of(
    order, offsets, expert, first, slots_in_all, ROWS: tl.constexpr, DENSE: tl.constexpr
):  # fmt: skip
    """`block_slots`; with DENSE, all rows are in order."""
    if DENSE:
        slots = first + tl.arange(0, ROWS)
        used = slots < slots_in_all
    else:
        slots, used = block_slots(order, offsets, expert, first, ROWS)
    return slots, used


@triton.jit
def planes_kernel(
    x, table, begin0, begin1, begin2, begin3, begin4, bias,
    output, order, offsets, block_expert, block_first,
    share, slots_in_all, parts, width, N, K, chunks, block_bytes, unit_stride, part_stride,
    slope, limit, offset,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr,
    UNROLL: tl.constexpr, FETCH: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """PLANES: that all experts have; 0 if they differ, or are not known. With DENSE, `begin0` and
    its like stand for the only row of the table: nothing has to be loaded first."""
    wait_for_others(PDL)
    # ptxas spills on sm_90 where eight parts read symmetric codes for four strips (see the table
    # in tests/kernels/test_triton_compile.py).
    STRIPS: tl.constexpr = 1 if ROWS < 64 else ROWS // (32 if PARTS == 8 and KIND == 0 else 16)
    EACH: tl.constexpr = ROWS // STRIPS
    from_position = tl.arange(0, 8)[:, None] + tl.arange(0, EACH // 8)[None, :] * 8
    block, part = tl.program_id(1), tl.program_id(2)
    if DENSE:
        expert = 0
        begins = (
            tl.cast(begin0, tl.int64), tl.cast(begin1, tl.int64), tl.cast(begin2, tl.int64),
            tl.cast(begin3, tl.int64), tl.cast(begin4, tl.int64),
        )  # fmt: skip
        begins_b = begins
        if FETCH and PLANES > 0:
            fetch_blocks(
                begins, begins_b, block, N, chunks, block_bytes,
                BITS, KIND, PLANES, GATED, TWO,
            )  # fmt: skip
        first = tl.program_id(0) * ROWS
    else:
        expert = tl.load(block_expert + tl.program_id(0))
        if expert < 0:
            return
        begins = addresses(table + (expert * parts + part) * 5)
        begins_b = begins
        if GATED:
            begins_b = addresses(table + (expert * parts + part + 1) * 5)
        first = tl.load(block_first + tl.program_id(0))
        # Addresses are multiples of 16, so this adds 0. The loads below depend on it, so that ptxas
        # puts them behind those of the addresses.
        bits = begins[0] | begins[1] | begins[2] | begins[3] | begins[4] | begins_b[0]
        bits |= begins_b[1] | begins_b[2] | begins_b[3] | begins_b[4]
        first += (bits & 15).to(tl.int32)
        if FETCH and PLANES > 0:
            first += fetch_blocks(
                begins, begins_b, block, N, chunks, block_bytes,
                BITS, KIND, PLANES, GATED, TWO,
            )  # fmt: skip
    from_x = ()
    for strip in tl.static_range(STRIPS):
        own = first + strip * EACH + from_position
        if DENSE:
            own = tl.where(own < slots_in_all, own, 0)
        else:
            inside = own < tl.load(offsets + expert + 1)
            own = tl.load(order + own, mask=inside, other=0)
        # Rows that are not in use are those of slot 0: computed, but not written.
        from_x = from_x + (x + (own // share).to(tl.int64) * K,)  # type: ignore[assignment]
    # Of many rows the slots are looked up again at the end: they would take registers until then.
    if STRIPS == 1:
        slots, used = slots_of(order, offsets, expert, first, slots_in_all, EACH, DENSE)
    block_b = block
    if TWO and not GATED:
        block = block * 2
        block_b = tl.minimum(block + 1, (N + 15) // 16 - 1)
    if PLANES > 0:
        sums, more = sum_units(
            begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
            BITS, KIND, PLANES, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
        )  # fmt: skip
    elif KIND > 0:
        if begins[1] != 0:
            sums, more = sum_units(
                begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
                BITS, KIND, 2, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
            )  # fmt: skip
        else:
            sums, more = sum_units(
                begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
                BITS, KIND, 1, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
            )  # fmt: skip
    elif begins[3] != 0:
        sums, more = sum_units(
            begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
            BITS, KIND, 4, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
        )  # fmt: skip
    elif begins[2] != 0:
        sums, more = sum_units(
            begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
            BITS, KIND, 3, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
        )  # fmt: skip
    elif begins[1] != 0:
        sums, more = sum_units(
            begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
            BITS, KIND, 2, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
        )  # fmt: skip
    else:
        sums, more = sum_units(
            begins, block, begins_b, block_b, from_x, chunks, block_bytes, K,
            BITS, KIND, 1, COMPUTE, GROUP, TWO, PARTS, UNROLL, EVEN, TAIL,
        )  # fmt: skip
    units = block * 16 + tl.arange(0, 16)
    for strip in tl.static_range(STRIPS):
        if STRIPS > 1:
            begin = first + strip * EACH
            slots, used = slots_of(order, offsets, expert, begin, slots_in_all, EACH, DENSE)
        store(
            sums[strip], more[strip], bias, output, expert, part, slots, used, units, width, N,
            unit_stride, part_stride, slope, limit, offset, CURVE, GATED, HAS_BIAS, False,
        )  # fmt: skip
        if TWO and not GATED:
            store(
                more[strip], more[strip], bias, output, expert, part, slots, used, units + 16,
                width, N, unit_stride, part_stride, slope, limit, offset,
                CURVE, GATED, HAS_BIAS, False,
            )  # fmt: skip


@triton.jit
def store(
    sums, more, bias, output, expert, part, slots, used, units, width, N,
    unit_stride, part_stride, slope, limit, offset,
    CURVE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Write (units, ROWS) sums with bias and activation; TURNED: as kernels/triton/tall.py reads
    them."""
    inside = units < N
    columns = units * unit_stride + part * part_stride
    if HAS_BIAS:
        at = bias + tl.cast(expert, tl.int64) * width + columns
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            more += tl.load(at + part_stride, mask=inside, other=0.0).to(tl.float32)[:, None]
    row = slots.to(tl.int64)
    if CURVE >= 0:
        sums = activate(sums, more, slope, limit, offset, CURVE, GATED)
        if TURNED:
            ROWS: tl.constexpr = sums.shape[1]
            UNITS: tl.constexpr = sums.shape[0]
            sums = tl.reshape(sums, (UNITS // 32, 4, 4, 2, ROWS))
            sums = tl.reshape(tl.permute(sums, (0, 2, 1, 3, 4)), (UNITS, ROWS))
        to = output + row[None, :] * N + units[:, None]
    else:
        to = output + row[None, :] * width + columns[:, None]
    tl.store(to, sums.to(output.dtype.element_ty), mask=used[None, :] & inside[:, None])


def parts_of(layout: PlaneLayout, expert: bool) -> int:
    """Parts of K that are summed apart, each by a warp: what the matrix alone decides, so that a
    row's bits do not depend on the number of rows. Experts are many; a matrix of its own needs more
    programs' warps to fill a GPU."""
    return 4 if expert or chunks_of(layout) < 64 else 8


def large_instructions(device: torch.device) -> bool:
    """Return whether a GPU has the matrix instructions and the bulk copies of sm_90; any other
    device can only interpret them."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def chunks_of(layout: PlaneLayout) -> int:
    return layout.padded_columns // CHUNK_COLUMNS


def constants_of(layout: PlaneLayout) -> dict[str, int]:
    """Return the constants that every launch is compiled for."""
    kind = SCALES.index(layout.scales)
    return {"BITS": layout.bits, "KIND": kind, "GROUP": layout.group_size}


def bytes_of_block(layout: PlaneLayout) -> int:
    return scale_bytes(layout.scales, layout.columns, layout.group_size)


def project_planes(
    x_XK: Tensor,
    table_EP5: Tensor | Addresses,
    layout: PlaneLayout,
    bias_EW: Tensor | None,
    blocks: Blocks | None,
    tile: PlaneTile,
    *,
    planes: int = 0,
    share: int = 1,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Rows of all slots in x's dtype: (S, W), or (S, W / parts) of a known activation.

    Rows of unused slots hold junk.

    Args:
        x_XK: contiguous rows; slot s reads row ``s // share``.
        table_EP5: from `address_table`; of the only matrix, its addresses.
        layout: of one part, arranged for CUDA.
        bias_EW: contiguous, of all experts, in the order of the projection; or None.
        blocks: from `routing`, with blocks of ``tile.rows``; None: all rows are of the only matrix.
        planes: that all experts have; 0 if they differ.
        epilogue: for a first projection.
    """
    epilogue = Epilogue() if epilogue is None else epilogue
    table, begins = None, (0,) * (_MOST_PLANES + 1)
    if isinstance(table_EP5, Tensor):
        table, parts = table_EP5, table_EP5.shape[1]
    else:
        begins, parts = table_EP5, 1
    known, gated = epilogue.activation is not None, epilogue.gated
    two = gated or tile.two
    if blocks is None:
        count, slots = triton.cdiv(len(x_XK), tile.rows), len(x_XK)
        where: tuple[Tensor | None, ...] = (None,) * 4
    else:
        count, slots = blocks.count, blocks.order_S.shape[0]
        where = blocks.order_S, blocks.offsets_E1, blocks.expert_B, blocks.first_B
    width = parts * layout.rows
    output_SN = x_XK.new_empty(slots, layout.rows if known else width)
    own = parts_of(layout, blocks is not None)
    step = UNIT_COLUMNS * own * tile.unroll
    rows = layout.num_blocks if gated or not two else -(-layout.num_blocks // 2)
    constants, large = tile.constants(own), large_instructions(x_XK.device)
    constants["FETCH"] &= large
    planes_kernel[count, rows, 1 if gated else parts](
        x_XK, table, *begins, bias_EW, output_SN, *where,
        share, slots, parts, width, layout.rows, layout.columns, chunks_of(layout),
        bytes_of_block(layout), *epilogue.strides(layout.rows), *epilogue.numbers,
        PLANES=min(planes, len(layout.format.plane_bits)), COMPUTE=compute_type(x_XK.dtype),
        CURVE=epilogue.curve, GATED=gated, HAS_BIAS=bias_EW is not None, DENSE=blocks is None,
        TWO=two, EVEN=layout.columns % step == 0,
        TAIL=chunks_of(layout) % 2 == 1,
        **constants_of(layout), **constants, **overlap_options(),
        **tile.options(own, x_XK.dtype, large),
    )  # fmt: skip
    return output_SN


def addresses_of(
    planes: Sequence[Tensor], scales: Tensor, layouts: Sequence[PlaneLayout], index: int
) -> Addresses:
    """Return the begins of the planes (0: there is none) and of the scales of a matrix.

    Args:
        planes, scales: blobs.
        layouts: of the matrices that lie one after the other in a blob.
        index: of the matrix.
    """
    before, held = layouts[:index], layouts[index].format.plane_bits
    begins = [
        planes[plane].data_ptr() + sum(layout.plane_bytes(plane) for layout in before)
        if plane < min(len(planes), len(held))
        else 0
        for plane in range(_MOST_PLANES)
    ]
    return *begins, scales.data_ptr() + sum(layout.scale_bytes for layout in before)


def address_table(
    planes: Sequence[tuple[Tensor, ...]],
    scales: Sequence[Tensor],
    layouts: Sequence[PlaneLayout],
    own: range,
    device: torch.device,
) -> Tensor:
    """(E, P, 5) int64: `addresses_of` matrices of all experts.

    Args:
        planes, scales: blobs of each expert.
        layouts: of the matrices that lie one after the other in a blob.
        own: the P matrices that are wanted.
    """
    rows = [
        [addresses_of(blobs, scale, layouts, index) for index in own]
        for blobs, scale in zip(planes, scales, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def readable(blobs: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether the kernels can read the blobs as they lie: on the device, dense and
    aligned."""
    return all(
        blob.device == device and blob.is_contiguous() and blob.data_ptr() % _ALIGNMENT == 0
        for blob in blobs
    )
