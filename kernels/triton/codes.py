"""Codes and scales of bit planes in registers, from the arrangement of kernels/planes.py for CUDA.

A *unit* is 64 columns of 16 rows. Each thread of a warp loads its own words of a plane and unpacks
them where they are: nothing passes through shared memory on the way to the matrix instruction.

Codes become numbers above 0, which bf16 and float16 hold exactly, of 8 bits in two pieces:
`symmetric_numbers` of symmetric codes, `file_numbers` of those that a file had quantised. That
their middle is not 0 is mended once for all products of a group (`less_middle`), not for each
number: instructions are what few rows wait for. Scales and offsets `group_scale` reads as
kernels/scales.py has them. Codes that are floating point numbers stay exact, too: `widened` moves
their bits to where wider types have them.

Shape legend: S units side by side, one of each warp; u and q, a thread's place in its warp, from 0
to 3 and from 0 to 7; c, p and h as in kernels/planes.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton import language

INTERPRETED = tl.constexpr(language.INTERPRETED)
CENTRED = tl.constexpr(1)
"""Numbers of the kinds of scales, by their order in kernels/scales.py; 0 is symmetric."""
OFFSET, SUPER, SUPER_OFFSET, SUPER_NIBBLES, FP8, MXFP4 = map(tl.constexpr, range(2, 8))
_EARLIER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
WIDTH = tl.constexpr(4 if _EARLIER else 2)
"""Neighbouring columns of a thread, of the operand that Triton makes of joined tensors."""
LAST_FIRST = tl.constexpr(not _EARLIER)
"""Neighbouring threads have neighbours of the last dimension, not of the first one, where memory
does not decide. Where one of both is wrong, products are right, but slow."""


@triton.jit
def and_or(word, MASK: tl.constexpr, MORE: tl.constexpr):
    """``(word & MASK) | MORE``, in one instruction: the compiler makes two."""
    if INTERPRETED:
        return (word & MASK) | MORE
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r",
            [word, tl.full(word.shape, MASK, tl.uint32), tl.full(word.shape, MORE, tl.uint32)],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def chosen(word, other, MASK: tl.constexpr):
    """Bits of `word` where MASK has some, else those of `other`; see `and_or`."""
    if INTERPRETED:
        return (word & MASK) | (other & (0xFFFFFFFF ^ MASK))
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r",
            [word, other, tl.full(word.shape, MASK, tl.uint32)],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Load values; 0 where it is masked."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_by_thread(pointers, mask, MASKED: tl.constexpr):
    """As `load`, of (u, q, S) or (u, q, S, ...); the first dimension is that of neighbouring
    threads, the third that of warps."""
    if not LAST_FIRST:
        return load(pointers, mask, MASKED)
    if MASKED:
        mask = tl.broadcast_to(mask, pointers.shape)
    if len(pointers.shape) == 3:
        pointers = tl.permute(pointers, (2, 1, 0))
        if MASKED:
            mask = tl.permute(mask, (2, 1, 0))
        return tl.permute(load(pointers, mask, MASKED), (2, 1, 0))
    elif len(pointers.shape) == 4:
        pointers = tl.permute(pointers, (2, 1, 0, 3))
        if MASKED:
            mask = tl.permute(mask, (2, 1, 0, 3))
        return tl.permute(load(pointers, mask, MASKED), (2, 1, 0, 3))
    else:
        pointers = tl.permute(pointers, (3, 2, 1, 0, 4))
        if MASKED:
            mask = tl.permute(mask, (3, 2, 1, 0, 4))
        return tl.permute(load(pointers, mask, MASKED), (3, 2, 1, 0, 4))


@triton.jit
def load_words(
    plane, chunk, wanted,
    BITS: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr, LATER: tl.constexpr = 0,
):  # fmt: skip
    """(u, q, S, BITS) words of a plane; (u, q, S) of 1 bit, and (u, q, S, 2, 4) of 8.

    Dimensions go from the one that is nearest in memory on, but for a thread's own words:
    so each thread loads what it unpacks.

    Args:
        plane: where the block of rows begins.
        chunk: (S,) of each unit's first 32 columns.
        wanted: (S,) with MASKED; the words of others are 0.
        TAIL: the last 32 columns, which have no neighbour; the other half is junk.
        LATER: chunks to add, which cost no instruction.
    """
    u, q = tl.arange(0, 4), tl.arange(0, 8)
    begin = chunk * (16 * BITS)
    MORE: tl.constexpr = LATER * 16 * BITS
    if BITS == 1:
        lane = q[None, :, None] * 4 + u[:, None, None]
        at = begin[None, None, :] + (lane // 2 if TAIL else lane)
        words = load_by_thread(plane + at + MORE, wanted[None, None, :], MASKED)
        if TAIL:
            words = words >> (u % 2).to(tl.uint32)[:, None, None]
    elif BITS == 8:  # a thread takes 16 bytes at once
        lane = q[None, :, None, None, None] * 4 + u[:, None, None, None, None]
        half, own = tl.arange(0, 2)[None, None, None, :, None], tl.arange(0, 4)
        at = lane * 4 if TAIL else lane * 8 + half * 4
        at = begin[None, None, :, None, None] + at + own[None, None, None, None, :]
        at, _ = tl.broadcast(at, half)
        words = load_by_thread(plane + at + MORE, wanted[None, None, :, None, None], MASKED)
    else:
        OWN: tl.constexpr = BITS // 2 if TAIL else BITS
        own = tl.arange(0, BITS)[None, None, None, :]
        lane = q[None, :, None, None] * 4 + u[:, None, None, None]
        at = begin[None, None, :, None] + lane * OWN + (own % OWN)
        if not TAIL:
            at = begin[None, None, :, None] + lane * OWN + own
        words = load_by_thread(plane + at + MORE, wanted[None, None, :, None], MASKED)
    return words


@triton.jit
def half_of(words, T: tl.constexpr):
    """The half T of a thread's words: (u, q, S, W / 2), or (u, q, S) of two."""
    if len(words.shape) == 5:
        first, second = tl.split(tl.permute(words, (0, 1, 2, 4, 3)))
    elif words.shape[3] == 2:
        first, second = tl.split(words)
    else:
        S: tl.constexpr = words.shape[2]
        by_half = tl.permute(tl.reshape(words, (4, 8, S, 2, 2)), (0, 1, 2, 4, 3))
        first, second = tl.split(by_half)
    if T == 0:
        return first
    else:
        return second


@triton.jit
def arranged(a0, a1, a2, a3, b0, b1, b2, b3, OWN: tl.constexpr):
    """(S, 16, 32) numbers of (u, q, S, h) pairs: of both rows of a thread, p from 0 to 3.

    Columns are in the order (p % 2, u, p // 2, h), or where OWN is 2 (p, u, h): that of the
    operands, so that nothing moves. `load_rows` has that of WIDTH.
    """
    S: tl.constexpr = a0.shape[2]
    first = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    second = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    numbers = tl.join(first, second)  # u q S h p1 p0 c
    if OWN == 4:
        numbers = tl.permute(numbers, (2, 6, 1, 5, 0, 4, 3))
    else:
        numbers = tl.permute(numbers, (2, 6, 1, 4, 5, 0, 3))
    return tl.reshape(numbers, (S, 16, 32))


@triton.jit
def in_order(numbers):
    """(S, 16, 32) numbers of `arranged`, column by column."""
    S: tl.constexpr = numbers.shape[0]
    if WIDTH == 4:
        numbers = tl.permute(tl.reshape(numbers, (S, 16, 2, 4, 2, 2)), (0, 1, 3, 4, 2, 5))
    else:
        numbers = tl.permute(tl.reshape(numbers, (S, 16, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(numbers, (S, 16, 32))


@triton.jit
def load_rows(
    from_x, column, K,
    COMPUTE: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """(S, 32, ROWS) activations, columns in the order of `arranged`: 8 u + 2 p + h of each u.

    Args:
        from_x: (8, ROWS / 8) pointers of rows; row r of 8 and then i is ``8 i + r``.
        column: (S,) the first of 32.
        HALF: with 0 or 1, only 16 of these columns, others are 0; -1 for all.
        LATER: columns to add, which cost no instruction.
    """
    S: tl.constexpr = column.shape[0]
    MORE: tl.constexpr = from_x.shape[1]
    u, own = tl.arange(0, 4), tl.arange(0, 8)
    depth = u[:, None, None, None, None] * 8 + own[None, None, None, None, :]
    at = column[None, None, :, None, None] + depth
    pointers = from_x[None, :, None, :, None] + at + LATER
    x = load_by_thread(pointers, at + LATER < K, MASKED)
    if HALF >= 0:
        x = tl.where((u // 2 == HALF)[:, None, None, None, None], x, 0.0)
    x = tl.reshape(x.to(COMPUTE), (4, 8, S, MORE, 2, 2, 2))  # u r S i p1 p0 h
    x = tl.permute(x, (2, 5, 0, 4, 6, 3, 1) if WIDTH == 4 else (2, 4, 5, 0, 6, 3, 1))
    return tl.reshape(x, (S, 32, 8 * MORE))


@triton.jit
def half_bits(
    word, P: tl.constexpr, HALVES: tl.constexpr, STEP: tl.constexpr, COMPUTE: tl.constexpr
):
    """The bits of ``STEP * (16 + nibble + HALVES / 2)`` of the two columns p of each word.

    Those of a bf16 or float16 are those of 16 and of a whole number below 16, both times STEP, a
    power of two: no conversion is needed.
    """
    EXPONENT: tl.constexpr = (STEP >= 2) + (STEP >= 4) + (STEP >= 8) + (STEP >= 16)
    if tl.bfloat16 == COMPUTE:
        own = word << 3 if P == 0 else word >> (4 * P - 3)
        return and_or(own, 0x00780078, (0x4180 + EXPONENT * 0x80 + HALVES * 4) * 0x00010001)
    else:
        own = word << (6 - 4 * P) if P < 2 else word >> (4 * P - 6)
        return and_or(own, 0x03C003C0, (0x4C00 + EXPONENT * 0x400 + HALVES * 32) * 0x00010001)


@triton.jit
def halves_of(word, COMPUTE: tl.constexpr):
    """Both numbers of each word, the lower one first."""
    low = (word & 0xFFFF).to(tl.int16).to(COMPUTE, bitcast=True)
    high = (word >> 16).to(tl.int16).to(COMPUTE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def pair_of(word, P: tl.constexpr, HALVES: tl.constexpr, STEP: tl.constexpr, COMPUTE: tl.constexpr):
    """``STEP * (16 + nibble + HALVES / 2)``, in float32 16 STEP less, of the two columns p of each
    word: (u, q, S, h)."""
    if tl.float32 == COMPUTE:
        own = word << 1 if P == 0 else word >> (4 * P - 1)
        own = and_or(own, 0x001E001E, HALVES * 0x00010001)
        low = (own & 0xFFFF).to(tl.float32) * (STEP * 0.5)
        return tl.join(low, (own >> 16).to(tl.float32) * (STEP * 0.5))
    else:
        return halves_of(half_bits(word, P, HALVES, STEP, COMPUTE), COMPUTE)


@triton.jit
def whole_pair(high, low, P: tl.constexpr, COMPUTE: tl.constexpr):
    """``16 * nibble + nibble - 136`` of the two columns p of each word: (u, q, S, h)."""
    if tl.float32 == COMPUTE:
        own = pair_of(high, P, 0, 16, COMPUTE) + pair_of(low, P, 0, 1, COMPUTE)
        return own - 136.0
    else:
        high, low = half_bits(high, P, 0, 16, COMPUTE), half_bits(low, P, 0, 1, COMPUTE)
        if INTERPRETED:
            own = halves_of(high, COMPUTE).to(tl.float32) + halves_of(low, COMPUTE).to(tl.float32)
            return (own - 408.0).to(COMPUTE)
        elif tl.bfloat16 == COMPUTE:  # two numbers at once; the compiler adds one by one
            less = tl.full(high.shape, 0xC3CCC3CC, tl.uint32)  # -408
            own = tl.inline_asm_elementwise(
                """{
                .reg .b32 less;
                add.rn.bf16x2 less, $1, $3;
                add.rn.bf16x2 $0, less, $2;
                }""", "=r,r,r,r", [high, low, less], dtype=tl.uint32, is_pure=True, pack=1,
            )  # fmt: skip
            return halves_of(own, COMPUTE)
        else:
            less = tl.full(high.shape, 0xDE60DE60, tl.uint32)
            own = tl.inline_asm_elementwise(
                """{
                .reg .b32 less;
                add.rn.f16x2 less, $1, $3;
                add.rn.f16x2 $0, less, $2;
                }""", "=r,r,r,r", [high, low, less], dtype=tl.uint32, is_pure=True, pack=1,
            )  # fmt: skip
            return halves_of(own, COMPUTE)


@triton.jit
def lifted(
    first, second,
    HALVES: tl.constexpr, STEP: tl.constexpr, COMPUTE: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """(S, 16, 32) numbers ``STEP * (nibble + HALVES / 2 + lift)`` of a thread's words of both
    rows; the lift is 16, of float32 0."""
    return arranged(
        pair_of(first, 0, HALVES, STEP, COMPUTE), pair_of(first, 1, HALVES, STEP, COMPUTE),
        pair_of(first, 2, HALVES, STEP, COMPUTE), pair_of(first, 3, HALVES, STEP, COMPUTE),
        pair_of(second, 0, HALVES, STEP, COMPUTE), pair_of(second, 1, HALVES, STEP, COMPUTE),
        pair_of(second, 2, HALVES, STEP, COMPUTE), pair_of(second, 3, HALVES, STEP, COMPUTE), OWN,
    )  # fmt: skip


@triton.jit
def offset_less_middle(
    least, scale,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the number that is added to each number times its scale, where it is `least` for each
    code."""
    codes = tl.full(scale.shape, 2.0 ** (BITS - 1), tl.float32)
    return least + scale * less_middle(codes, 1.0, BITS, KIND, PLANES, COMPUTE)


@triton.jit
def less_middle(
    numbers, ones,
    BITS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``numbers`` less what all pieces of a code are above its distance from the middle, so many
    times; float32 both, or sums of products and of activations."""
    LIFT: tl.constexpr = 0 if tl.float32 == COMPUTE else 16
    if KIND >= FP8:
        return numbers
    elif KIND == 0:
        MIDDLE: tl.constexpr = 16 * (LIFT + 8) + (LIFT + 8 if PLANES == 4 else 0)
        return numbers - ones * MIDDLE
    else:
        STEP: tl.constexpr = 2 ** (BITS - 4) if BITS > 4 else 1
        REST: tl.constexpr = LIFT if BITS > 4 and PLANES == 2 else 0
        MISSING: tl.constexpr = (STEP - 1) / 2 if PLANES == 1 else 0
        return numbers - ones * (STEP * LIFT + 2 ** (BITS - 1) + REST - MISSING)


@triton.jit
def symmetric_words(own, T: tl.constexpr, PIECE: tl.constexpr, PLANES: tl.constexpr):
    """Words of both rows of a thread whose nibbles are a piece of the codes, in a unit's half T."""
    if PIECE == 1:
        first, second = tl.split(half_of(own[3], T))
    else:
        high = half_of(own[0], T)
        if PLANES == 1:
            first, second = (high << 2) & 0xCCCCCCCC, high & 0xCCCCCCCC
        else:
            low = own[1] if T else own[1] << 1
            low = low & 0xAAAAAAAA if PLANES == 2 else chosen(low, own[2] >> T, 0xAAAAAAAA)
            first = chosen(high << 2, low, 0xCCCCCCCC)
            second = chosen(high, low >> 2, 0xCCCCCCCC)
    return first, second


@triton.jit
def symmetric_numbers(
    own, T: tl.constexpr, PIECE: tl.constexpr,
    PLANES: tl.constexpr, COMPUTE: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """(S, 16, 32) numbers of a unit's half T, of 8 bits the sum of two pieces; `less_middle` makes
    them ``code - 136``.

    Missing bits stand for the middle of the codes that begin with the others.

    Args:
        own: each thread's words of the planes.
    """
    HALVES: tl.constexpr = (3 if PLANES == 1 else (1 if PLANES == 2 else 0)) * (1 - PIECE)
    first, second = symmetric_words(own, T, PIECE, PLANES)
    return lifted(first, second, HALVES, 1 if PIECE else 16, COMPUTE, OWN)


@triton.jit
def whole_numbers(
    own, T: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr, OWN: tl.constexpr
):
    """(S, 16, 32) numbers ``code - 136`` of a unit's half T, exact in one piece; see
    `symmetric_numbers`."""
    if PLANES < 4:
        LIFT: tl.constexpr = 0 if tl.float32 == COMPUTE else 16
        return symmetric_numbers(own, T, 0, PLANES, COMPUTE, OWN) - 16.0 * (LIFT + 8)
    else:
        a, b = symmetric_words(own, T, 0, PLANES)
        c, d = symmetric_words(own, T, 1, PLANES)
        return arranged(
            whole_pair(a, c, 0, COMPUTE), whole_pair(a, c, 1, COMPUTE),
            whole_pair(a, c, 2, COMPUTE), whole_pair(a, c, 3, COMPUTE),
            whole_pair(b, d, 0, COMPUTE), whole_pair(b, d, 1, COMPUTE),
            whole_pair(b, d, 2, COMPUTE), whole_pair(b, d, 3, COMPUTE), OWN,
        )  # fmt: skip


@triton.jit
def nibbles_of(words, BITS: tl.constexpr, T: tl.constexpr):
    """Words of both rows of a thread whose nibbles are the bits of a plane, in a unit's half T."""
    if BITS == 4:
        first, second = tl.split(half_of(words, T))
    elif BITS == 2:
        both = half_of(words, T)
        first, second = both & 0x33333333, (both >> 2) & 0x33333333
    else:
        first, second = (words >> T) & 0x11111111, (words >> (2 + T)) & 0x11111111
    return first, second


@triton.jit
def file_numbers(
    own, T: tl.constexpr, PIECE: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(S, 16, 32) numbers of a unit's half T, of more than 4 bits the sum of two pieces;
    `less_middle` makes them the code less half of what BITS can count.

    Missing bits stand for the middle of the codes that begin with the others.

    Args:
        own: each thread's words of the planes.
        PLANES: that there are, 1 or 2.
    """
    if PIECE == 1:
        first, second = nibbles_of(own[1], BITS - 4, T)
        return lifted(first, second, 0, 1, COMPUTE, WIDTH)
    else:
        first, second = nibbles_of(own[0], 4 if BITS >= 4 else 2, T)
        if BITS == 3:
            first, second = first << 1, second << 1
            if PLANES == 2:
                low, more = nibbles_of(own[1], 1, T)
                first, second = first | low, second | more
        HALVES: tl.constexpr = 1 if BITS == 3 and PLANES == 1 else 0
        STEP: tl.constexpr = 2 ** (BITS - 4) if BITS > 4 else 1
        return lifted(first, second, HALVES, STEP, COMPUTE, WIDTH)


@triton.jit
def widened(word, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COMPUTE: tl.constexpr):
    """Two small floats of each word: (u, q, S, h). They begin at the highest bit of each half.

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
def float_numbers(words, T: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr):
    """(S, 16, 32) numbers of a unit's half T; codes of 8 bits are E4M3, those of 4 bits E2M1."""
    if BITS == 8:
        S: tl.constexpr = words.shape[2]
        pairs = tl.reshape(half_of(words, T), (4, 8, S, 2, 2))
        early, late = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        a, b = tl.split(early)
        c, d = tl.split(late)
        return arranged(
            widened(a << 8, 4, 3, COMPUTE), widened(a, 4, 3, COMPUTE),
            widened(c << 8, 4, 3, COMPUTE), widened(c, 4, 3, COMPUTE),
            widened(b << 8, 4, 3, COMPUTE), widened(b, 4, 3, COMPUTE),
            widened(d << 8, 4, 3, COMPUTE), widened(d, 4, 3, COMPUTE), WIDTH,
        )  # fmt: skip
    else:
        a, b = tl.split(half_of(words, T))
        return arranged(
            widened(a << 12, 2, 1, COMPUTE), widened(a << 8, 2, 1, COMPUTE),
            widened(a << 4, 2, 1, COMPUTE), widened(a, 2, 1, COMPUTE),
            widened(b << 12, 2, 1, COMPUTE), widened(b << 8, 2, 1, COMPUTE),
            widened(b << 4, 2, 1, COMPUTE), widened(b, 2, 1, COMPUTE), WIDTH,
        )  # fmt: skip


@triton.constexpr_function
def has_offsets(kind):
    return kind == OFFSET or SUPER_OFFSET <= kind < FP8


@triton.jit
def half_float(words, late):
    """Float32 numbers of the lower or the upper float16 of words."""
    half = (words >> (late * 16).to(tl.uint32)).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def super_group(scales, group, KIND: tl.constexpr, GROUP: tl.constexpr):
    """(S, 1) pointers to the bytes of the 256 columns that a group is of, and to the group's."""
    GROUPS: tl.constexpr = 256 // GROUP
    HEAD: tl.constexpr = 32 if KIND == SUPER else 64
    EACH: tl.constexpr = 32 if KIND == SUPER_OFFSET else 16
    own = scales + group // GROUPS * (HEAD + EACH * GROUPS)
    return own, own + HEAD + group % GROUPS * EACH


@triton.jit
def outer_scale(
    scales, group, wanted,
    KIND: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Twice (S, 16) float32: what the scales, and the offsets, of 256 columns are multiplied by;
    junk where there is no such thing. See `group_scale`."""
    scale = tl.zeros((group.shape[0], 16), tl.float32)
    least = scale
    if KIND >= SUPER and KIND < FP8:
        within = tl.arange(0, 16)[None, :]
        mask = None
        if MASKED:
            mask = (wanted[:, None] & (within >= 0)) != 0
        own, _ = super_group(scales, group[:, None] + LATER, KIND, GROUP)
        own = own.to(tl.pointer_type(tl.float16)) + within
        scale = load(own, mask, MASKED).to(tl.float32)
        if KIND > SUPER:
            least = load(own + 16, mask, MASKED).to(tl.float32)
    return scale, least


@triton.jit
def group_scale(
    scales, outer, group, wanted,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """(S, 16) float32 scales of groups, and what is added to each code times its scale.

    Args:
        scales: bytes of the block of rows.
        outer: from `outer_scale`.
        group, wanted: (S,); the scale of a group that is not wanted is 0.
        LATER: groups to add, which cost symmetric codes no instruction.
    """
    within = tl.arange(0, 16)[None, :]
    if KIND > 0:
        group += LATER
    group, mask = group[:, None], None
    if MASKED:
        mask = (wanted[:, None] & (within >= 0)) != 0
    least = tl.zeros((group.shape[0], 16), tl.float32)
    if KIND == FP8:
        at = scales.to(tl.pointer_type(tl.float32)) + group * 16 + within
        scale = load(at, mask, MASKED)
    elif KIND == MXFP4:
        power = load(scales + group * 16 + within, mask, MASKED).to(tl.int32)
        # 2 ** (power - 127); the least of them has no exponent of its own.
        scale = tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
    elif KIND <= OFFSET:
        NUMBERS: tl.constexpr = 2 if KIND == OFFSET else 1
        # Whole words: smaller loads are not pipelined.
        at = scales.to(tl.pointer_type(tl.uint32)) + group * (8 * NUMBERS) + within // 2
        MORE: tl.constexpr = 0 if KIND > 0 else LATER * 8
        scale = half_float(load(at + MORE, mask, MASKED), within % 2)
        if KIND == OFFSET:
            least = half_float(load(at + 8, mask, MASKED), within % 2)
    else:
        _, at = super_group(scales, group, KIND, GROUP)
        at += within
        scale, inner = outer[0], load(at, mask, MASKED)
        if KIND == SUPER:
            scale *= inner.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            if KIND == SUPER_OFFSET:
                minimum = load(at + 16, mask, MASKED)
            else:
                minimum = inner >> 4
                inner = inner & 15
            scale *= inner.to(tl.float32)
            least = -outer[1] * minimum.to(tl.float32)
    return scale, least
