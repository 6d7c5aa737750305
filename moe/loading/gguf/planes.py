"""Blocks of GGUF's quantised types as codes and scales of bit planes, without rounding.

Each function takes ``(N, blocks, bytes)`` uint8 and gives ``(N, K)`` unsigned codes and the scales
of kernels/scales.py. The layout of blocks is that of ggml's ``ggml-common.h``; the tests compare
with the package ``gguf``. Legend: N rows, U superblocks of 256 weights a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.planes import PlaneFormat
from kernels.scales import GroupScales

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class GgufPlanes:
    """Makes planes from weights of a type: their format, and codes and scales from blocks."""

    format: PlaneFormat
    read: Callable[[Tensor], tuple[Tensor, GroupScales]]


def _halves(blocks: Tensor, start: int) -> Tensor:
    """``(N, blocks)`` float16 numbers at a byte of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Low fields of all bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """``(..., 8 / width * bytes)``: fields of all bytes, the lowest ones first."""
    shifts = range(0, 8, width)
    return torch.cat([packed >> shift & (1 << width) - 1 for shift in shifts], -1)


def _single_bits(packed: Tensor) -> Tensor:
    """``(..., 8 * bytes)``: the bits of a little-endian number."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    return _nibbles(blocks[..., 2:]).flatten(1), GroupScales(_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    return _nibbles(blocks[..., 4:]).flatten(1), GroupScales(_halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    codes = _nibbles(blocks[..., 6:]) | _single_bits(blocks[..., 2:6]) << 4
    return codes.flatten(1), GroupScales(_halves(blocks, 0))


def _q5_1(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    codes = _nibbles(blocks[..., 8:]) | _single_bits(blocks[..., 4:8]) << 4
    return codes.flatten(1), GroupScales(_halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    return (blocks[..., 2:] ^ 128).flatten(1), GroupScales(_halves(blocks, 0))


def _mxfp4(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    return _nibbles(blocks[..., 1:]).flatten(1), GroupScales(blocks[..., 0])


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    return _of_table(_nibbles(blocks[..., 2:])).flatten(1), GroupScales(_halves(blocks, 0))


def _of_table(codes: Tensor) -> Tensor:
    return (torch.tensor(_IQ4) + 128).to(torch.uint8)[codes.int()]


def _q2_k(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    both = blocks[..., :16].flatten(1)
    codes = _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(1)
    return codes, GroupScales(both & 15, both >> 4, _halves(blocks, 80), _halves(blocks, 82))


def _q3_k(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    high = _bits(blocks[..., :32], 1)
    codes = _bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(2) | high << 2
    low, top = _nibbles(blocks[..., 96:104]), _bits(blocks[..., 104:108], 2)
    scale = (low | top << 4).view(torch.int8) - 32
    return codes.flatten(1), GroupScales(scale.flatten(1), None, _halves(blocks, 108))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: 8 of 6 bits each, from 12 bytes."""
    a, b, c = packed.split(4, -1)
    scale = torch.cat([a & 63, c & 15 | (a >> 6) << 4], -1)
    return scale.flatten(1), torch.cat([b & 63, c >> 4 | (b >> 6) << 4], -1).flatten(1)


def _q4_k(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1)
    own = _six_bits(blocks[..., 4:16])
    return codes, GroupScales(*own, _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(2)
    codes = low | _bits(blocks[..., 16:48], 1) << 4
    own = _six_bits(blocks[..., 4:16])
    return codes.flatten(1), GroupScales(*own, _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    codes = low | _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2) << 4
    scale = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return codes.flatten(1), GroupScales(scale, None, _halves(blocks, 208))


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, GroupScales]:
    codes = _of_table(_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))))
    pairs = blocks[..., 4:8, None]
    low = torch.cat([pairs & 15, pairs >> 4], -1).flatten(2)
    fields = blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    scale = (low | fields.flatten(2) << 4).view(torch.int8) - 32
    return codes.flatten(1), GroupScales(scale.flatten(1), None, _halves(blocks, 0))


TYPES = {
    "Q4_0": GgufPlanes(PlaneFormat(32, 4, "centred"), _q4_0),
    "Q4_1": GgufPlanes(PlaneFormat(32, 4, "offset"), _q4_1),
    "Q5_0": GgufPlanes(PlaneFormat(32, 5, "centred"), _q5_0),
    "Q5_1": GgufPlanes(PlaneFormat(32, 5, "offset"), _q5_1),
    "Q8_0": GgufPlanes(PlaneFormat(32, 8, "centred"), _q8_0),
    "Q2_K": GgufPlanes(PlaneFormat(16, 2, "super-nibbles"), _q2_k),
    "Q3_K": GgufPlanes(PlaneFormat(16, 3, "super"), _q3_k),
    "Q4_K": GgufPlanes(PlaneFormat(32, 4, "super-offset"), _q4_k),
    "Q5_K": GgufPlanes(PlaneFormat(32, 5, "super-offset"), _q5_k),
    "Q6_K": GgufPlanes(PlaneFormat(16, 6, "super"), _q6_k),
    "MXFP4": GgufPlanes(PlaneFormat(32, 4, "mxfp4"), _mxfp4),
    "IQ4_NL": GgufPlanes(PlaneFormat(32, 8, "centred"), _iq4_nl),
    "IQ4_XS": GgufPlanes(PlaneFormat(32, 8, "super"), _iq4_xs),
}
"""By ggml's name. The weights of both IQ4 types are 8-bit numbers, so they need 8 bits here."""
