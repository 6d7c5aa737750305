"""Arranges planes of a store's file for CUDA where they lie, all matrices of a layer at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.planes import PlaneLayout
from kernels.triton.planes import chunks_of

_ARRANGED_UNITS = 4  # of a program of `arrange_kernel`


@triton.jit
def arrange_units(
    plane, units, per_block, chunks, BITS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Arrange UNITS units of a plane where they lie: each stays within its bytes."""
    thread = tl.program_id(0) * (UNITS * 32) + tl.arange(0, UNITS * 32)
    unit, q, u = thread // 32, thread % 32 // 4, thread % 4
    inside = unit < units
    begin = unit // per_block * chunks + unit % per_block * 2  # the first chunk
    tail = unit % per_block * 2 + 1 >= chunks
    word = tl.arange(0, BITS)
    STEPS: tl.constexpr = 8 // BITS
    result = tl.zeros((UNITS * 32, BITS), tl.uint32)
    for half in tl.static_range(2):
        chunk, from_u, known = begin + half, u, inside & (tail == 0)
        if half == 0:
            known = inside
        if BITS == 1:  # in a tail, two threads share a word
            chunk = begin + tl.where(tail, 0, half)
            from_u = tl.where(tail, (u + half) % 4, u)
            known = inside
        for index in tl.static_range(16):
            late, p, h = index // 8, index // 2 % 4, index % 2
            step = from_u * 2 + p // 2
            if BITS == 8:
                position = step * 0
                own = 4 * half + 2 * (p // 2) + late
                bit = 8 * (p % 2) + 16 * h
            elif BITS == 4:
                position = step % STEPS * 4
                own = 2 * half + late
                bit = 4 * p + 16 * h
            elif BITS == 2:
                position = 6 - step % STEPS * 2
                own = half
                bit = 4 * p + 16 * h + 2 * late
            else:
                position = 7 - step % 4 * 2 - step // 4
                own = 0
                bit = 4 * p + 16 * h + 2 * late + half
            from_word = (chunk * BITS + step // STEPS) * 16 + q + 8 * late
            value = tl.load(plane + from_word, mask=known, other=0)
            code = (value >> (position + 8 * (2 * (p % 2) + h)).to(tl.uint32)) & ((1 << BITS) - 1)
            result |= tl.where((word == own)[None, :], (code << bit)[:, None], 0)
    lane = thread % 32
    if BITS == 1:
        at, stored = tl.where(tail, lane // 2, lane), inside & ((tail == 0) | (u % 2 == 0))
        at, stored = at[:, None] + word[None, :], stored[:, None]
    else:
        width = tl.where(tail, BITS // 2, BITS)
        at = (lane * width)[:, None] + word[None, :]
        stored = inside[:, None] & (word[None, :] < width[:, None])
    tl.debug_barrier()  # the program's threads have read all that any of them overwrites
    tl.store(plane + begin[:, None].to(tl.int64) * (16 * BITS) + at, result, mask=stored)


@triton.jit
def arrange_kernel(
    table, units, per_block, chunks, WIDTHS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """A program has UNITS units of a matrix, in each of its planes, of WIDTHS bits."""
    entry = table + tl.program_id(1) * 5
    for plane in tl.static_range(len(WIDTHS)):
        address = tl.load(entry + plane)
        if address != 0:
            words = address.to(tl.pointer_type(tl.uint32))
            arrange_units(words, units, per_block, chunks, WIDTHS[plane], UNITS)


def arrange(table_EP5: Tensor, layout: PlaneLayout) -> None:
    """Arrange the planes of matrices of one layout for CUDA where they lie, in one launch.

    Args:
        table_EP5: from `address_table`.
    """
    per_block = triton.cdiv(chunks_of(layout), 2)
    units = layout.num_blocks * per_block
    arrange_kernel[triton.cdiv(units, _ARRANGED_UNITS), table_EP5.shape[0] * table_EP5.shape[1]](
        table_EP5, units, per_block, chunks_of(layout),
        WIDTHS=layout.format.plane_bits, UNITS=_ARRANGED_UNITS, enable_fp_fusion=False,
    )  # fmt: skip
