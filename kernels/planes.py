"""Weights as nested bit planes: 8-bit codes whose first bits alone are a coarser weight.

`PlaneMatrix` and `QuantizedExperts` hold matrices and layers in this format; `quantize` and `pack`
make it, `dequantize` reads it back. kernels/reference.py has the arithmetic on it.

A weight is ``scale * (code - 136)`` with an unsigned code of 8 bits and one scale, of either sign,
for each group of 32 or 64 weights of a row (round to nearest). The code is cut into planes of 2, 1,
1 and 4 bits, highest first: the first one to four planes are a weight of 2, 3, 4 or 8 bits. A
prefix stands for the middle of the codes that begin with it (half-step centring, ELMoE-3D's LSB
augmentation): truncation would bias every weight downwards.

136 is such a middle for 4 bits, which therefore are a signed integer of their own, ``16 * scale *
i`` with i from -8 to 7: rounded to nearest, with an exact zero. The scale makes the largest weight
of a group exact in 4 bits, as -8, by its sign where the weight is positive; or as 7, where -8 would
push the opposite extreme off the grid. That costs a little mean error and improves the model
(`python -m benchmarks.quality`): the largest weights matter most.

The kernels read the layout as it is: blocks of 16 rows; within a block,
*steps* of 4 columns, each 64 codes (row by row, 4 columns of a row side by side): the operand of a
vector dot product that gives 16 rows at once. A 64-byte vector of the 2-bit plane holds 4 steps,
the first in the highest bits; one of the 4-bit plane holds 2, the first in the low half. One of a
1-bit plane holds 8, the first 4 in every other bit from the highest on, the last 4 in the bits
between: two such planes are 2 bits a step again after one selection. Rows are padded to 16 and
columns to whole groups, with code 136 and scale 0.

On a CUDA device the planes have an arrangement of their own (`arranged`), made while loading. It
moves bits only within blocks of 16 rows, so sizes, blocks and scales stay as they are, and each
plane can still be read alone. A *unit* is 64 columns of a block. Each of the 32 threads that
multiply by it finds its words of 32 bits side by side: those of two rows, q and ``8 + q`` (c = 0
and c = 1; q from 0 to 7), and of the columns ``32 t + 8 u + 2 p + h`` of one u (u and p from 0 to
3, t and h 0 or 1). Thread ``4 q + u`` has of a plane of

- 1 bit: 1 word; a column's bit is ``4 p + 16 h + 2 c + t``;
- 2 bits: 2 words, t; its bits begin at ``4 p + 16 h + 2 c``;
- 4 bits: 4 words, ``2 t + c``; its bits begin at ``4 p + 16 h``;
- 8 bits: 8 words, ``4 t + 2 (p // 2) + c``; its bits begin at ``8 (p % 2) + 16 h``.

So one shift at most lets the planes' bits of a column meet in one nibble, and two neighbouring
columns lie 16 bits apart, as matrix instructions take them. A last unit of 32 columns has t = 0
only; there, two threads share a word of 1 bit, and ``u % 2`` stands for t.

Weights that a file has quantised already keep its own codes, of 2 to 6 or 8 bits, and its own
scales and offsets (kernels/scales.py). Their planes are few: the first 4 bits, then the others; of
2 and 3 bits the first 2. Four bits are unpacked with a mask and a shift, and have no coarser
prefix. The middle of a prefix is that of the codes that begin with it, to a half. Columns are
padded to 32. Codes that are floating point numbers (``fp8``, ``mxfp4``) are one plane.

Shape legend: N rows (outputs), K columns (inputs), B blocks of 16 rows, D groups of a row; E, F, G,
H and S as in kernels/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.scales import (
    BLOCK_ROWS,
    SCALES,
    GroupScales,
    Scales,
    block_bytes,
    has_float_codes,
    is_centred,
    pack_group_scales,
    unpack_group_scales,
)

PLANE_BITS = (2, 1, 1, 4)
PrefixBits = Literal[2, 3, 4, 8]
Arrangement = Literal["cpu", "cuda"]
PREFIX_BITS: tuple[PrefixBits, ...] = (2, 3, 4, 8)
GROUP_SIZES = (32, 64)
FILE_GROUP_SIZES = (16, 32, 64, 128)
FILE_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""Bits of the planes of codes that come from a file, by the bits of a code."""
FLOAT_FORMATS: dict[Scales, tuple[int, tuple[int, ...]]] = {
    "fp8": (8, (32, 64, 128)),
    "mxfp4": (4, (32,)),
}
"""Bits of a code, and columns that may share a scale, where codes are floating point numbers."""
FILE_ROW_GROUP = 32
"""Columns of activations that share a scale where weights come from a file."""
CHUNK_COLUMNS = 32
"""Columns of half a unit of the arrangement for CUDA devices."""
STEP_COLUMNS = 4
ZERO_CODE = 136
MAX_CODE = 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of 4 bits; the highest one is their sign."""
_LARGEST_BELOW, _LARGEST_ABOVE = 8 * 16, 7 * 16  # codes from zero
_STEP_CODES = BLOCK_ROWS * STEP_COLUMNS
_ARRANGED_CHUNKS = 1 << 15
"""Rearranged at once: a byte a code and more is in memory for a while."""
_LAST = (-7, -6, -5, -4, -3, -2, -1)
"""Dimensions of a unit in the order of its words; see `_to_words`."""
_POSITIONS = {1: (7, 5, 3, 1, 6, 4, 2, 0), 2: (6, 4, 2, 0), 4: (0, 4), 8: (0,)}
"""Lowest bit of each step within a byte of a plane of this many bits, first step first."""


class PlaneFormat(NamedTuple):
    """The quantisation of a matrix, whatever its size: the last fields of `PlaneLayout`."""

    group_size: int = 64
    bits: int = 8
    scales: Scales = "symmetric"

    @property
    def plane_bits(self) -> tuple[int, ...]:
        """Bits of each plane."""
        if has_float_codes(self.scales):
            return (self.bits,)
        return PLANE_BITS if self.scales == "symmetric" else FILE_PLANES[self.bits]

    @property
    def prefix_bits(self) -> tuple[int, ...]:
        """Bits of the first plane, of the first two, ..., of all."""
        return tuple(accumulate(self.plane_bits))

    def num_planes(self, bits: int) -> int:
        """Return how many planes the longest prefix of at most so many bits has, 1 at least."""
        return max(1, sum(own <= bits for own in self.prefix_bits))

    @property
    def row_group(self) -> int:
        """Columns of activations that share a scale."""
        return self.group_size if self.scales == "symmetric" else FILE_ROW_GROUP


@dataclass(frozen=True)
class PlaneLayout:
    """The places of an ``(N, K)`` matrix's codes in its planes, and its quantisation.

    Attributes:
        group_size: columns that share a scale.
        bits: of a code.
        scales: see kernels/scales.py; codes that are ``symmetric`` or ``fp8`` have 8 bits, those
            of ``mxfp4`` 4.
        arrangement: of the bits, for CPUs or for CUDA devices.

    Raises:
        ValueError: a group size or width that the kind of scales does not have, or a dimension that
            is not positive.
    """

    rows: int
    columns: int
    group_size: int = 64
    bits: int = 8
    scales: Scales = "symmetric"
    arrangement: Arrangement = "cpu"

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            raise ValueError(f"scales are {', '.join(SCALES)}, got {self.scales}")
        own = self.scales == "symmetric"
        if self.scales in FLOAT_FORMATS:
            bits, groups = FLOAT_FORMATS[self.scales]
            if self.bits != bits or self.group_size not in groups:
                raise ValueError(
                    f"{self.scales} codes have {bits} bits and groups of "
                    f"{' or '.join(map(str, groups))}, got {self.bits} and {self.group_size}"
                )
        if own and self.group_size not in GROUP_SIZES:
            raise ValueError(f"group size must be 32 or 64, got {self.group_size}")
        if not own and self.group_size not in FILE_GROUP_SIZES:
            raise ValueError(f"group size must be 16, 32, 64 or 128, got {self.group_size}")
        if self.bits not in ((8,) if own else FILE_PLANES):
            raise ValueError(f"codes with {self.scales} scales cannot have {self.bits} bits")
        if self.rows < 1 or self.columns < 1:
            raise ValueError(
                f"a matrix needs at least one row and column, got {self.rows}x{self.columns}"
            )

    @property
    def format(self) -> PlaneFormat:
        return PlaneFormat(self.group_size, self.bits, self.scales)

    @property
    def for_cpus(self) -> bool:
        """Return whether the compiled kernels for CPUs read it."""
        return self.arrangement == "cpu" and not has_float_codes(self.scales)

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group_size)

    @property
    def padded_rows(self) -> int:
        return self.num_blocks * BLOCK_ROWS

    @property
    def padded_columns(self) -> int:
        group = self.format.row_group
        return -(-self.columns // group) * group

    def plane_bytes(self, plane: int) -> int:
        """Bytes of one plane, a multiple of 64; 0 for one that the format does not have."""
        widths = self.format.plane_bits
        bits = widths[plane] if plane < len(widths) else 0
        return self.padded_rows * self.padded_columns * bits // 8

    @property
    def scale_bytes(self) -> int:
        return self.num_blocks * block_bytes(self.scales, self.columns, self.group_size)

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scales == "symmetric" else torch.uint8

    @property
    def num_scales(self) -> int:
        """Elements of the blob of scales."""
        return self.scale_bytes // self.scale_dtype.itemsize

    def nbytes(self, bits: int) -> int:
        """Bytes of the longest prefix of at most so many bits, with its scales."""
        planes = range(self.format.num_planes(bits))
        return sum(map(self.plane_bytes, planes)) + self.scale_bytes


def num_planes(bits: int) -> int:
    """Return the number of planes of a prefix. Raises ValueError for widths that are none of
    `PREFIX_BITS`."""
    if bits not in PREFIX_BITS:
        raise ValueError(f"a prefix has 2, 3, 4 or 8 bits, got {bits}")
    return PREFIX_BITS.index(bits) + 1


def quantize(weight_NK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights, round to nearest; any leading dimensions.

    Args:
        weight_NK: ``(..., N, K)`` floating point, finite.
        group_size: columns that share a scale.

    Returns:
        ``(..., N, K)`` uint8 codes and ``(..., N, D)`` float16 scales. A scale is rounded away from
        zero, so that no code is clipped.

    Raises:
        ValueError: a weight is NaN, infinite or too large for a float16 scale.
    """
    columns = weight_NK.shape[-1]
    weight = pad(weight_NK.float(), (0, -columns % group_size)).unflatten(-1, (-1, group_size))
    scale = _next_float16(_scale(-weight.amin(-1), weight.amax(-1)))
    if not bool(scale.isfinite().all()):
        raise ValueError("weights must be finite and below 7e6 in size to be quantized")
    divisor = scale.float().masked_fill(scale == 0, 1.0)[..., None]
    codes = (weight / divisor).round() + ZERO_CODE
    return codes.clamp(0, MAX_CODE).to(torch.uint8).flatten(-2)[..., :columns], scale


def pack(codes_NK: Tensor, layout: PlaneLayout) -> tuple[Tensor, ...]:
    """The planes of ``(..., N, K)`` uint8 codes: ``(..., plane_bytes(p))`` uint8 each."""
    steps = _steps(codes_NK, layout)  # (..., B, padded K / 4, 64)
    planes, shift = [], layout.bits
    for bits in layout.format.plane_bits:
        shift -= bits
        parts = ((steps >> shift) & (2**bits - 1)).unflatten(-2, (-1, 8 // bits))
        vector = torch.zeros_like(parts[..., 0, :])
        for index, position in enumerate(_POSITIONS[bits]):
            vector |= parts[..., index, :] << position
        planes.append(vector.flatten(-3))
    if layout.arrangement == "cuda":
        return arranged(planes, [layout], "cuda")
    return tuple(planes)


def arranged(
    planes: Sequence[Tensor], layouts: Sequence[PlaneLayout], arrangement: Arrangement
) -> tuple[Tensor, ...]:
    """The first planes of matrices that lie one after the other, in the other arrangement.

    Args:
        planes: ``(..., bytes)`` uint8, in the arrangement that is not asked for.
    """
    return tuple(
        torch.cat(
            [_arranged(*piece, arrangement) for piece in _pieces_of(plane, index, layouts)], -1
        )
        for index, plane in enumerate(planes)
    )


def _pieces_of(
    plane: Tensor, index: int, layouts: Sequence[PlaneLayout]
) -> Iterator[tuple[Tensor, int, int]]:
    """Pieces of a blob of planes that can be arranged each by itself, with their bits a code and
    chunks a row.

    Args:
        index: of the plane.
        layouts: of the matrices in the blob.
    """
    for matrix, layout in zip(
        plane.split([layout.plane_bytes(index) for layout in layouts], -1), layouts, strict=True
    ):
        if matrix.shape[-1]:
            bits = layout.format.plane_bits[index]
            chunks = layout.padded_columns // CHUNK_COLUMNS
            blocks = max(1, _ARRANGED_CHUNKS // chunks)
            for piece in matrix.split(blocks * chunks * _STEP_CODES * bits, -1):
                yield piece, bits, chunks


def _arranged(plane: Tensor, bits: int, chunks: int, arrangement: Arrangement) -> Tensor:
    """See `arranged`; legend: B blocks, C chunks, R rows of a block, v vectors, i steps, b columns
    of a step; t c q u p h as at the top of this module, of p each bit apart."""
    lead = plane.shape[:-1]
    if arrangement == "cuda":
        positions = plane.new_tensor(_POSITIONS[bits])
        bytes_BCvRb = plane.view(*lead, -1, chunks, bits, BLOCK_ROWS, STEP_COLUMNS)
        codes = (bytes_BCvRb[..., None] >> positions) & (2**bits - 1)  # B C v R b i
        codes = codes.movedim(-3, -4).movedim(-1, -2)  # B C R v i b
        codes = codes.reshape(*lead, -1, chunks, 2, 8, 4, 2, 2, 2)  # B C c q u p1 p0 h
        pairs, last = codes.tensor_split([chunks // 2 * 2], -7)
        words = _to_words(pairs.unflatten(-7, (-1, 2)), bits).flatten(-2)
        if chunks % 2:
            words = torch.cat(
                [words, _to_words(last[..., None, :, :, :, :, :, :], bits)[..., 0, :]], -1
            )
        return words.flatten(len(lead))
    each = _STEP_CODES * bits
    pairs, last = plane.view(*lead, -1, chunks * each).tensor_split([chunks // 2 * 2 * each], -1)
    codes = _from_words(pairs.unflatten(-1, (-1, 2 * each)), bits).flatten(-8, -7)
    if chunks % 2:
        codes = torch.cat(
            [codes, _from_words(last[..., None, :], bits)[..., 0, :, :, :, :, :, :, :]], -7
        )
    codes = codes.reshape(
        *lead, -1, chunks, BLOCK_ROWS, bits, 8 // bits, STEP_COLUMNS
    )  # B C R v i b
    steps = codes << codes.new_tensor(_POSITIONS[bits])[:, None]
    return steps.sum(-2, dtype=torch.uint8).movedim(-2, -3).flatten(len(lead))  # B C v R b


def _to_words(codes: Tensor, bits: int) -> Tensor:
    """``(..., bytes)`` of units for CUDA from codes ``(..., t, c, q, u, p1, p0, h)``."""
    if bits == 8:
        return codes.movedim((-5, -4, -7, -3, -6, -1, -2), _LAST).flatten(-7)
    if bits == 1 and codes.shape[-7] == 1:  # every other u stands for t
        codes = codes.unflatten(-4, (2, 2)).movedim(-4, -8)[..., 0, :, :, :, :, :, :]
    own = codes.movedim((-5, -4, -7, -6, -1, -3, -2), _LAST)  # q u t c h p1 p0
    own = own[..., 0] | own[..., 1] << 4
    if bits <= 2:
        own = own[..., 0, :, :] | own[..., 1, :, :] << 2  # q u t h p1
    if bits == 1:
        own = own[..., 0, :, :] | own[..., 1, :, :] << 1  # q u h p1
        return own.flatten(-4)
    return own.flatten(-5 if bits == 2 else -6)


def _from_words(units: Tensor, bits: int) -> Tensor:
    """The inverse of `_to_words`, of ``(..., bytes)`` with one or two t."""
    two = units.shape[-1] // (_STEP_CODES * bits)
    if bits == 8:
        return units.unflatten(-1, (8, 4, two, 2, 2, 2, 2)).movedim(
            _LAST, (-5, -4, -7, -3, -6, -1, -2)
        )
    if bits == 4:
        own = units.unflatten(-1, (8, 4, two, 2, 2, 2))
    elif bits == 2:
        own = units.unflatten(-1, (8, 4, two, 2, 2))
    else:
        own = units.unflatten(-1, (8, 2 * two, 2, 2))
        own = torch.stack([own, own >> 1], -3)
    if bits <= 2:
        own = torch.stack([own, own >> 2], -3)  # q u t c h p1
    codes = torch.stack([own, own >> 4], -1) & (2**bits - 1)
    codes = codes.movedim(_LAST, (-5, -4, -7, -6, -1, -3, -2))
    if bits == 1 and two == 1:
        codes = codes.movedim(-7, -4).flatten(-5, -4)[..., None, :, :, :, :, :, :]
    return codes


def unpack(planes: Sequence[Tensor], layout: PlaneLayout) -> Tensor:
    """``(..., N, K)`` uint8 codes of the first planes. All planes give the codes that were packed.

    The bits of missing planes are centred in symmetric codes, else 0. Codes that are floating point
    numbers keep their bits.
    """
    if layout.arrangement == "cuda":
        return unpack(arranged(planes, [layout], "cpu"), replace(layout, arrangement="cpu"))
    lead = planes[0].shape[:-1]
    steps = torch.zeros(
        *lead, layout.num_blocks, layout.padded_columns // STEP_COLUMNS, _STEP_CODES,
        dtype=torch.uint8, device=planes[0].device,
    )  # fmt: skip
    shift = layout.bits
    for plane, bits in zip(planes, layout.format.plane_bits, strict=False):
        shift -= bits
        vectors = plane.view(*lead, layout.num_blocks, -1, 1, _STEP_CODES)
        parts = [(vectors >> position) & (2**bits - 1) for position in _POSITIONS[bits]]
        steps |= torch.cat(parts, -2).flatten(-3, -2) << shift
    if shift and layout.scales == "symmetric":
        steps |= 1 << (shift - 1)
    blocks = steps.unflatten(-1, (BLOCK_ROWS, STEP_COLUMNS)).transpose(-3, -2)
    codes = blocks.flatten(-2).flatten(-3, -2)
    return codes[..., : layout.rows, : layout.columns]


def pack_scales(scales_ND: Tensor, layout: PlaneLayout) -> Tensor:
    """``(..., num_scales)`` float16, block by block, group by group, row by row."""
    padded = pad(scales_ND, (0, 0, 0, layout.padded_rows - layout.rows))
    return padded.unflatten(-2, (-1, BLOCK_ROWS)).transpose(-2, -1).flatten(-3)


def unpack_scales(scales: Tensor, layout: PlaneLayout) -> Tensor:
    """``(..., N, D)`` float16, the inverse of `pack_scales`."""
    blocks = scales.unflatten(-1, (layout.num_blocks, layout.num_groups, BLOCK_ROWS))
    return blocks.transpose(-2, -1).flatten(-3, -2)[..., : layout.rows, :]


def dequantize(planes: Sequence[Tensor], scales: Tensor, layout: PlaneLayout) -> Tensor:
    """``(..., N, K)`` float32 weights that the first planes stand for.

    Leading dimensions are for symmetric codes only.
    """
    if layout.scales == "symmetric":
        values = unpack(planes, layout).float().sub_(ZERO_CODE)
        spread = unpack_scales(scales, layout).float().repeat_interleave(layout.group_size, -1)
        return values.mul_(spread[..., : layout.columns])
    codes = unpack(planes, layout)
    if has_float_codes(layout.scales):
        values = float_values(codes, layout.scales)
    else:
        values = codes.float()
        values += (2 ** (layout.bits - layout.format.prefix_bits[len(planes) - 1]) - 1) / 2
    if is_centred(layout.scales):
        values -= 2 ** (layout.bits - 1)
    spread, offset = unpack_group_scales(
        scales, layout.scales, layout.group_size, layout.rows, layout.columns
    )
    values *= spread.repeat_interleave(layout.group_size, -1)[:, : layout.columns]
    if offset is not None:
        values += offset.repeat_interleave(layout.group_size, -1)[:, : layout.columns]
    return values


def float_values(codes: Tensor, kind: Scales) -> Tensor:
    """Float32 numbers of uint8 codes that are E4M3 (``fp8``) or E2M1 (``mxfp4``)."""
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    values = torch.tensor(E2M1, device=codes.device)
    return torch.cat([values, -values])[codes.int()]


def _scale(low: Tensor, high: Tensor) -> Tensor:
    """Return scales of groups in [-low, high], one of them 0 or more: negative where `high` is
    larger."""
    larger, smaller = torch.maximum(low, high), torch.minimum(low, high)
    scale = larger / _LARGEST_BELOW
    fits = smaller <= scale * (MAX_CODE - ZERO_CODE)
    scale = torch.where(fits, scale, larger / _LARGEST_ABOVE)
    return torch.where(high > low, -scale, scale)


def _steps(codes_NK: Tensor, layout: PlaneLayout) -> Tensor:
    rows, columns = layout.padded_rows - layout.rows, layout.padded_columns - layout.columns
    zero = ZERO_CODE if layout.scales == "symmetric" else 0
    codes = pad(codes_NK, (0, columns, 0, rows), value=zero)
    blocks = codes.unflatten(-2, (-1, BLOCK_ROWS)).unflatten(-1, (-1, STEP_COLUMNS))
    return blocks.transpose(-3, -2).flatten(-2)


def _next_float16(values: Tensor) -> Tensor:
    """Float32 values rounded away from zero."""
    nearest = values.to(torch.float16)
    larger = (nearest.view(torch.int16) + 1).view(torch.float16)  # in size: the sign is a bit apart
    return torch.where(nearest.float().abs() < values.abs(), larger, nearest)


@dataclass(frozen=True, eq=False)
class PlaneMatrix:
    """An (N, K) matrix at the precision of its first planes; compared by identity.

    Attributes:
        layout: where the codes lie.
        planes: the first planes, ``(plane_bytes(p),)`` uint8 each.
        scales: ``(num_scales,)`` of the layout's dtype.
        bias: ``(N,)`` floating point, or None.
    """

    layout: PlaneLayout
    planes: tuple[Tensor, ...]
    scales: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check_blobs(self.planes, self.scales, (self.layout,), "a matrix")

    @classmethod
    def of_file(cls, codes_NK: Tensor, scales: GroupScales, layout: PlaneLayout) -> PlaneMatrix:
        """A matrix with a file's own codes, uint8, and scales; not for symmetric ones."""
        blob = pack_group_scales(scales, layout.scales, layout.group_size, layout.columns)
        return cls(layout, pack(codes_NK, layout), blob)

    @property
    def bits(self) -> int:
        return self.layout.format.prefix_bits[len(self.planes) - 1]

    def for_device(self, device: torch.device) -> PlaneMatrix:
        """With the bits arranged for a device, moved within memory of the same size; itself where
        they are."""
        wanted = arrangement_for(device)
        if wanted == self.layout.arrangement:
            return self
        layout = replace(self.layout, arrangement=wanted)
        return replace(self, layout=layout, planes=arranged(self.planes, [self.layout], wanted))


def arrangement_for(device: torch.device) -> Arrangement:
    """Return the arrangement of codes that is best on a device."""
    return "cuda" if device.type == "cuda" else "cpu"


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """The experts of one MoE layer as nested bit planes; compared by identity.

    A blob of an expert joins its matrices: the parts of the first projection one after the other,
    then the second projection. Each expert holds a prefix of its own length.

    Attributes:
        first: layout of one part, (F, H), of the first projection.
        parts: 2 for gate and up, in this order; 1 for experts without a gate.
        second: layout of the second projection, (H, F).
        planes: of each expert its first blobs of uint8; a matrix with fewer planes than another
            has no part in the last ones.
        scales: of each expert one blob, of float16 where all codes are symmetric, else of uint8.
        activation: (S, G) -> (S, F), the architecture's own, on rows in its own order.
        interleaved: the activation wants gate and up row by row in turn, not one after the other.
        gate_up_bias_EG: (E, G) added to the first projection, in the architecture's own order.
        down_bias_EH: (E, H) added to the second projection.
        post_norm: (S, H) -> (S, H), applied to each expert's output row before its routing weight.
        layer_experts: the most experts that a call asks for, where these are slots of several
            layers; None: all of them.
        row_bits: of activations on CPUs: 8, or 24, which keep what a float has (three products of
            8 bits). Kernels on other devices keep the dtype.
    """

    first: PlaneLayout
    parts: int
    second: PlaneLayout
    planes: tuple[tuple[Tensor, ...], ...]
    scales: tuple[Tensor, ...]
    activation: Callable[[Tensor], Tensor]
    interleaved: bool = False
    gate_up_bias_EG: Tensor | None = None
    down_bias_EH: Tensor | None = None
    post_norm: Callable[[Tensor], Tensor] | None = None
    layer_experts: int | None = None
    row_bits: Literal[8, 24] = 8

    def __post_init__(self) -> None:
        if self.parts not in (1, 2) or (self.interleaved and self.parts == 1):
            raise ValueError(f"experts have 1 part, or 2 to interleave, got {self.parts}")
        if (self.second.rows, self.second.columns) != (self.first.columns, self.first.rows):
            raise ValueError(
                f"the second projection must be (H, F) where the first is (F, H), got "
                f"{self.second.rows}x{self.second.columns} and "
                f"{self.first.rows}x{self.first.columns}"
            )
        if len(self.planes) != len(self.scales):
            raise ValueError(f"{len(self.planes)} experts' planes, {len(self.scales)} scales")
        for expert, (planes, scales) in enumerate(zip(self.planes, self.scales, strict=True)):
            _check_blobs(planes, scales, self.layouts, f"expert {expert}")
        if len({scales.device for scales in self.scales}) != 1:
            raise ValueError("a layer needs at least one expert, and all experts on one device")

    @property
    def num_experts(self) -> int:
        return len(self.planes)

    @property
    def hidden_size(self) -> int:
        return self.first.columns

    @property
    def intermediate_size(self) -> int:
        return self.first.rows

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, on average where they hold different numbers of planes."""
        return sum(map(self.expert_bytes_of, range(self.num_experts))) // self.num_experts

    def expert_bytes_of(self, expert: int) -> int:
        """Bytes of the expert's planes, scales and biases."""
        biases = [b[expert] for b in (self.gate_up_bias_EG, self.down_bias_EH) if b is not None]
        blobs = (*self.planes[expert], self.scales[expert], *biases)
        return sum(blob.numel() * blob.element_size() for blob in blobs)

    @property
    def prefix_bits(self) -> tuple[int, ...]:
        """Bits of the first blob of planes, of the first two, ...: of the finest matrix."""
        return joint_prefix_bits(self.first.format, self.second.format)

    def bits_of(self, expert: int) -> int:
        return self.prefix_bits[len(self.planes[expert]) - 1]

    def at_most(self, bits: int) -> QuantizedExperts:
        """The same experts at no more than ``bits`` bits, but for one plane; shares all memory."""
        keep = max(1, sum(own <= bits for own in self.prefix_bits))
        return replace(self, planes=tuple(planes[:keep] for planes in self.planes))

    def for_device(self, device: torch.device) -> QuantizedExperts:
        """See `PlaneMatrix.for_device`; one expert after the other, into new memory."""
        own = arrangement_for(device)
        if own == self.first.arrangement:
            return self
        planes = tuple(arranged(planes, self.layouts, own) for planes in self.planes)
        return replace(self.relabelled(own), planes=planes)

    def relabelled(self, arrangement: Arrangement) -> QuantizedExperts:
        """The same memory, whose bits lie, or will lie, in this arrangement."""
        first, second = (replace(x, arrangement=arrangement) for x in (self.first, self.second))
        return replace(self, first=first, second=second)

    def matrices(self, expert: int) -> tuple[PlaneMatrix, ...]:
        """The parts of the expert's first projection, then the second; views, without biases."""
        planes = [
            blob.split([layout.plane_bytes(plane) for layout in self.layouts])
            for plane, blob in enumerate(self.planes[expert])
        ]
        scales = self.scales[expert].view(torch.uint8)
        own = scales.split([layout.scale_bytes for layout in self.layouts])
        return tuple(
            PlaneMatrix(
                layout,
                tuple(blobs[index] for blobs in planes[: len(layout.format.plane_bits)]),
                own[index].view(layout.scale_dtype),
            )
            for index, layout in enumerate(self.layouts)
        )

    @property
    def layouts(self) -> tuple[PlaneLayout, ...]:
        """The layouts of a blob's matrices, in order."""
        return (self.first,) * self.parts + (self.second,)


def joint_prefix_bits(first: PlaneFormat, second: PlaneFormat) -> tuple[int, ...]:
    """Bits of the finer of two matrices at the first plane, at the first two, ..., of both."""
    pairs = zip_longest(first.prefix_bits, second.prefix_bits, fillvalue=0)
    return tuple(accumulate((max(pair) for pair in pairs), max))


def join_matrices(matrices: Sequence[PlaneMatrix]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The blobs of one expert's planes, and of its scales, from its matrices in order."""
    count = max(len(matrix.planes) for matrix in matrices)
    planes = (
        torch.cat([matrix.planes[plane] for matrix in matrices if plane < len(matrix.planes)])
        for plane in range(count)
    )
    same = len({matrix.scales.dtype for matrix in matrices}) == 1
    scales = [matrix.scales if same else matrix.scales.view(torch.uint8) for matrix in matrices]
    return tuple(planes), torch.cat(scales)


def _check_blobs(
    planes: tuple[Tensor, ...], scales: Tensor, layouts: Sequence[PlaneLayout], name: str
) -> None:
    most = max(len(layout.format.plane_bits) for layout in layouts)
    if not 1 <= len(planes) <= most:
        raise ValueError(f"{name} must hold 1 to {most} planes, got {len(planes)}")
    for plane, blob in enumerate(planes):
        size = sum(layout.plane_bytes(plane) for layout in layouts)
        if blob.shape != (size,) or blob.dtype != torch.uint8 or not blob.is_contiguous():
            raise ValueError(
                f"plane {plane} of {name} must be ({size},) uint8 and contiguous, "
                f"got {tuple(blob.shape)} {blob.dtype}"
            )
    dtypes = {layout.scale_dtype for layout in layouts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    size = sum(layout.scale_bytes for layout in layouts) // dtype.itemsize
    if scales.shape != (size,) or scales.dtype != dtype or not scales.is_contiguous():
        raise ValueError(
            f"the scales of {name} must be ({size},) {str(dtype).removeprefix('torch.')} and "
            f"contiguous, got {tuple(scales.shape)} {scales.dtype}"
        )
    if len({blob.device for blob in (*planes, scales)}) > 1:
        raise ValueError(f"the planes and scales of {name} must be on one device")
