"""Codes and scales of bit planes in registers, from the arrangement of kernels/planes.py for CUDA.

Codes become whole numbers, or halves where bits are missing, which bf16 and float16 hold exactly:
`chunk_numbers` those of symmetric codes, `file_numbers` those that a file had quantised, whose
scales and offsets `group_scale` reads as kernels/scales.py has them. Codes that are floating point
numbers stay exact, too: `widened` moves their bits to where wider types have them.
"""

from __future__ import annotations

import triton
import triton.language as tl

CENTRED = tl.constexpr(1)
"""Numbers of the kinds of scales, by their order in kernels/scales.py; 0 is symmetric."""
OFFSET, SUPER, SUPER_OFFSET, SUPER_NIBBLES, FP8, MXFP4 = map(tl.constexpr, range(2, 8))


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
def nibbles_of_rows(plane, chunk, inside, COLUMNS: tl.constexpr):
    """(COLUMNS, 4) words of a plane of 4 bits; see `words_of_rows`."""
    pair = chunk[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    at = pair * 8 + tl.arange(0, 4)[None, None, :, None] * 2
    at += tl.arange(0, 2)[None, None, None, :]
    words = tl.load(plane + at, mask=inside[:, None, None, None], other=0)
    return tl.reshape(tl.permute(words, (0, 3, 1, 2)), (COLUMNS, 4))


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
        low = nibbles_of_rows(plane3, chunk, inside, COLUMNS)
        # 16 (high - 8) + (low - 8), all of it exact.
        numbers = numbers * 8.0 + doubled(low, 0, COMPUTE, COLUMNS) * 0.5
    return numbers


@triton.jit
def widened(word, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COMPUTE: tl.constexpr):
    """Two small floats of each word: (N, 4, 2). They begin at the highest bit of each half.

    A product mends the exponent, of numbers below the least one, too: bf16 and float16
    are never flushed.
    """
    WIDE: tl.constexpr = 5 if tl.float16 == COMPUTE else 8
    LIFT: tl.constexpr = 2.0 ** (2 ** (WIDE - 1) - 2 ** (EXPONENT - 1))
    FIELD: tl.constexpr = 2**15 - 2 ** (15 - EXPONENT - MANTISSA)
    MASK: tl.constexpr = (FIELD >> (WIDE - EXPONENT)) * 0x00010001
    own = (word & 0x80008000) | ((word >> (WIDE - EXPONENT)) & MASK)
    if tl.float32 == COMPUTE:
        low = (own << 16).to(tl.float32, bitcast=True)
        high = (own & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (own & 0xFFFF).to(tl.int16).to(COMPUTE, bitcast=True)
        high = (own >> 16).to(tl.int16).to(COMPUTE, bitcast=True)
    return tl.join(low, high) * LIFT


@triton.jit
def bytes_of_rows(plane, chunk, inside, COLUMNS: tl.constexpr):
    """(COLUMNS, 4) words of the first 16 columns, and of the others; see `words_of_rows`."""
    pair = chunk[:, None, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    at = pair * 16 + tl.arange(0, 4)[None, None, :, None, None] * 4
    at += tl.arange(0, 2)[None, None, None, :, None] * 2
    at += tl.arange(0, 2)[None, None, None, None, :]
    words = tl.load(plane + at, mask=inside[:, None, None, None, None], other=0)
    first, last = tl.split(tl.permute(words, (0, 4, 1, 2, 3)))
    return tl.reshape(first, (COLUMNS, 4)), tl.reshape(last, (COLUMNS, 4))


@triton.jit
def float_numbers(
    plane, chunk, inside, BITS: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr
):
    """(COLUMNS, 32) numbers of one chunk; codes of 8 bits are E4M3, those of 4 bits E2M1."""
    if BITS == 8:
        first, last = bytes_of_rows(plane, chunk, inside, COLUMNS)
        early = tl.join(widened(first << 8, 4, 3, COMPUTE), widened(first, 4, 3, COMPUTE))
        late = tl.join(widened(last << 8, 4, 3, COMPUTE), widened(last, 4, 3, COMPUTE))
    else:
        words = nibbles_of_rows(plane, chunk, inside, COLUMNS)
        early = tl.join(widened(words << 12, 2, 1, COMPUTE), widened(words << 8, 2, 1, COMPUTE))
        late = tl.join(widened(words << 4, 2, 1, COMPUTE), widened(words, 2, 1, COMPUTE))
    numbers = tl.permute(tl.join(early, late), (0, 4, 3, 1, 2))
    return tl.reshape(numbers, (COLUMNS, 32))


@triton.jit
def words_at(entry, PLANE: tl.constexpr):
    return tl.multiple_of(tl.load(entry + PLANE).to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def file_numbers(
    plane0, plane1, chunk, inside,
    BITS: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(COLUMNS, 32) numbers of one chunk: the code less half of what BITS can count.

    Missing bits stand for the middle of the codes that begin with the others.

    Args:
        chunk, inside: (COLUMNS / 16,) each block's chunk, and whether it is wanted.
        PLANES: that there are, 1 or 2.
    """
    late = (tl.arange(0, COLUMNS) // 8 % 2).to(tl.uint32)[:, None]  # the second row of two
    odd = (tl.arange(0, 4) % 2).to(tl.uint32)[None, :]
    if BITS >= 4:
        first = nibbles_of_rows(plane0, chunk, inside, COLUMNS)
    else:
        first = (words_of_rows(plane0, chunk, inside, 4, COLUMNS) >> (2 * late)) & 0x33333333
    if BITS == 3:
        first = first << 1
    second = first
    if PLANES == 2:
        if BITS == 8:
            second = nibbles_of_rows(plane1, chunk, inside, COLUMNS)
        elif BITS == 6:
            second = words_of_rows(plane1, chunk, inside, 4, COLUMNS)
            second = (second >> (2 * late)) & 0x33333333
        else:
            second = words_of_rows(plane1, chunk, inside, 2, COLUMNS)
            second = (second >> (odd + 2 * late)) & 0x11111111
    if BITS == 3 and PLANES == 2:
        first |= second
    # Twice a nibble less 8.
    numbers = doubled(first, 0, COMPUTE, COLUMNS)
    if BITS == 2:
        numbers = numbers * 0.5 + 6.0
    elif BITS == 3:
        numbers = numbers * 0.5 + (4.0 if PLANES == 2 else 4.5)
    elif BITS == 4:
        numbers = numbers * 0.5
    else:
        STEP: tl.constexpr = 2 ** (BITS - 4)
        numbers = numbers * (STEP / 2.0)
        if PLANES == 2:
            numbers = numbers + (doubled(second, 0, COMPUTE, COLUMNS) * 0.5 + 8.0)
        else:
            numbers = numbers + (STEP - 1) / 2.0
    return numbers


@triton.jit
def group_scale(
    scales, block, within, group, inside, block_bytes,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(COLUMNS,) float32 scales of a group, and what is added for each number of `file_numbers`.

    Args:
        scales: bytes of the matrix.
        block, within: (COLUMNS,) of rows.
        block_bytes: of the scales of 16 rows.
    """
    own = scales + block.to(tl.int64) * block_bytes
    least = tl.zeros_like(within).to(tl.float32)
    if KIND == FP8:
        at = own.to(tl.pointer_type(tl.float32)) + group * 16 + within
        scale = tl.load(at, mask=inside, other=0.0)
    elif KIND == MXFP4:
        power = tl.load(own + group * 16 + within, mask=inside, other=0).to(tl.int32)
        # 2 ** (power - 127); the least of them has no exponent of its own.
        scale = tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
    elif KIND <= OFFSET:
        NUMBERS: tl.constexpr = KIND
        at = own.to(tl.pointer_type(tl.float16)) + group * (16 * NUMBERS) + within
        scale = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if KIND == OFFSET:
            least = tl.load(at + 16, mask=inside, other=0.0).to(tl.float32)
    else:
        GROUPS: tl.constexpr = 256 // GROUP
        HEAD: tl.constexpr = 32 if KIND == SUPER else 64
        EACH: tl.constexpr = 32 if KIND == SUPER_OFFSET else 16
        own += group // GROUPS * (HEAD + EACH * GROUPS)
        outer = own.to(tl.pointer_type(tl.float16)) + within
        scale = tl.load(outer, mask=inside, other=0.0).to(tl.float32)
        at = own + HEAD + group % GROUPS * EACH + within
        inner = tl.load(at, mask=inside, other=0)
        if KIND == SUPER:
            scale *= inner.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            outer_least = tl.load(outer + 16, mask=inside, other=0.0).to(tl.float32)
            if KIND == SUPER_OFFSET:
                minimum = tl.load(at + 16, mask=inside, other=0)
            else:
                minimum = inner >> 4
                inner = inner & 15
            scale *= inner.to(tl.float32)
            least = -outer_least * minimum.to(tl.float32)
    if KIND == OFFSET or (KIND >= SUPER_OFFSET and KIND < FP8):
        least += scale * (2.0 ** (BITS - 1))
    return scale, least
