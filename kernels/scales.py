"""The scales of bit planes: what codes are multiplied by, and where that lies in memory.

A weight is ``scale * code + offset``. Each group of columns of a row has both, in one of these
ways:

- ``symmetric``: a float16 scale, of either sign, for codes around 136 (kernels/planes.py).
- ``centred``: a float16 scale for codes around the middle of their range (GGUF's Q4_0, Q5_0 and
  Q8_0).
- ``offset``: a float16 scale and a float16 offset (GGUF's Q4_1 and Q5_1, GPTQ, AWQ).
- ``super``: an int8 scale a group and a float16 one for each superblock of 256 columns, of which
  the product counts; codes around the middle of their range (Q3_K, Q6_K).
- ``super-offset``: a uint8 scale and a uint8 minimum a group, and float16 ones for 256 columns: the
  offset is minus the product of the minima (Q4_K, Q5_K).
- ``super-nibbles``: the same with 4 bits each in one byte, the scale in the low ones (Q2_K).
- ``fp8``: a float32 scale, for codes that are E4M3 numbers (FP8 checkpoints).
- ``mxfp4``: a power of two, an E8M0 byte, for codes that are E2M1 numbers (gpt-oss, GGUF's MXFP4).

The last two are for kernels/triton only.

The blob of a matrix goes block by block (16 rows). Within a block, float16 numbers (or those of the
last two kinds) go group by group, and for each group row by row: first the scales of the rows, then
their offsets. Superblocks follow one another, each with its own numbers first (scales, then
minima), then those of its groups; the last one has all its groups even if the matrix ends before.
Groups of 16 come in pairs, and so do those of ``mxfp4``. Codes of rows and columns that only fill
up have scale 0.

Shape legend: N rows, B blocks of rows, D groups of a row, U superblocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

Scales = Literal[
    "symmetric", "centred", "offset", "super", "super-offset", "super-nibbles", "fp8", "mxfp4"
]
SCALES: tuple[Scales, ...] = get_args(Scales)
"""In the order of their numbers in C++ (kernels/cpu/plane_matrix.h)."""
SUPERBLOCK = 256
BLOCK_ROWS = 16
_E8M0_BIAS = 127
_SCALE_DTYPES: dict[Scales, torch.dtype] = {"fp8": torch.float32, "mxfp4": torch.uint8}
"""Dtypes of scales of kinds without superblocks; else float16."""


@dataclass(frozen=True, eq=False)
class GroupScales:
    """The numbers of one matrix, as its file has them; unused ones are None.

    Attributes:
        scale_ND: float16, int8 or uint8; float32 of ``fp8``.
        offset_ND: float16 offsets, or uint8 minima.
        super_scale_NU, super_offset_NU: float16.
    """

    scale_ND: Tensor
    offset_ND: Tensor | None = None
    super_scale_NU: Tensor | None = None
    super_offset_NU: Tensor | None = None

    def rows(self, index: slice | Tensor) -> GroupScales:
        """Return the scales of some rows."""
        return self._each(lambda x: x[index])

    def to(self, device: torch.device) -> GroupScales:
        return self._each(lambda x: x.to(device))

    @property
    def is_finite(self) -> bool:
        floats = (x for x in self._all if x is not None and x.is_floating_point())
        return all(bool(x.isfinite().all()) for x in floats)

    @property
    def _all(self) -> tuple[Tensor | None, ...]:
        return self.scale_ND, self.offset_ND, self.super_scale_NU, self.super_offset_NU

    def _each(self, change: Callable[[Tensor], Tensor]) -> GroupScales:
        return GroupScales(*(None if x is None else change(x) for x in self._all))  # type: ignore[arg-type]


def has_superblocks(kind: Scales) -> bool:
    return kind.startswith("super")


def has_float_codes(kind: Scales) -> bool:
    """Return whether codes are small floating point numbers."""
    return kind in ("fp8", "mxfp4")


def is_centred(kind: Scales) -> bool:
    """Return whether codes lie around the middle of their range, and there are no offsets."""
    return kind in ("centred", "super")


def block_bytes(kind: Scales, columns: int, group_size: int) -> int:
    """Bytes of the scales of 16 rows; a multiple of 32."""
    if not has_superblocks(kind):
        each = {"offset": 4, "fp8": 4, "mxfp4": 1}.get(kind, 2)
        return each * BLOCK_ROWS * _stored_groups(kind, columns, group_size)
    own = 2 if kind == "super" else 4
    each = 2 if kind == "super-offset" else 1
    groups = SUPERBLOCK // group_size
    return BLOCK_ROWS * (own + each * groups) * -(-columns // SUPERBLOCK)


def _stored_groups(kind: Scales, columns: int, group_size: int) -> int:
    """Return the groups of a row, where there are no superblocks."""
    in_pairs = group_size == 16 or kind == "mxfp4"
    return -(-columns // (2 * group_size)) * 2 if in_pairs else -(-columns // group_size)


def pack_group_scales(own: GroupScales, kind: Scales, group_size: int, columns: int) -> Tensor:
    """The blob, uint8, of a matrix whose codes are not symmetric."""
    if not has_superblocks(kind):
        numbers = [own.scale_ND] if own.offset_ND is None else [own.scale_ND, own.offset_ND]
        more = _stored_groups(kind, columns, group_size) - own.scale_ND.shape[1]
        dtype = _SCALE_DTYPES.get(kind, torch.float16)
        blocks = [_by_block(pad(x.to(dtype), (0, more))) for x in numbers]
        return torch.stack(blocks, -2).flatten().view(torch.uint8)
    assert own.super_scale_NU is not None
    count = own.super_scale_NU.shape[1]
    parts = [_by_block(own.super_scale_NU)[..., None, :].contiguous().view(torch.uint8)]
    scale_ND = own.scale_ND.view(torch.uint8)
    if kind != "super":
        assert own.super_offset_NU is not None
        parts.append(_by_block(own.super_offset_NU)[..., None, :].contiguous().view(torch.uint8))
    missing = count * (SUPERBLOCK // group_size) - scale_ND.shape[1]
    numbers = [scale_ND] if own.offset_ND is None else [scale_ND, own.offset_ND]
    groups = [_by_block(pad(x, (0, missing))).unflatten(1, (count, -1)) for x in numbers]
    if kind == "super-nibbles":
        groups = [groups[0] | groups[1] << 4]
    inner = torch.stack(groups, -2).flatten(-2)  # (B, U, groups, 16 or 32)
    return torch.cat([*(part.flatten(2) for part in parts), inner.flatten(2)], -1).flatten()


def unpack_group_scales(
    blob: Tensor, kind: Scales, group_size: int, rows: int, columns: int
) -> tuple[Tensor, Tensor | None]:
    """``(N, D)`` float32 scales, and offsets where the kind has some."""
    blocks, groups = -(-rows // BLOCK_ROWS), -(-columns // group_size)

    def by_row(values_BDR: Tensor) -> Tensor:
        return values_BDR.transpose(1, 2).flatten(0, 1)[:rows, :groups].float()

    if not has_superblocks(kind):
        stored = blob.view(_SCALE_DTYPES.get(kind, torch.float16))
        if kind == "mxfp4":
            stored = powers_of_two(stored)
        stored = stored.view(blocks, _stored_groups(kind, columns, group_size), -1)
        scale, *offset = stored.split(BLOCK_ROWS, 2)
        return by_row(scale), by_row(offset[0]) if offset else None
    count, each = -(-columns // SUPERBLOCK), SUPERBLOCK // group_size
    own = 1 if kind == "super" else 2
    head, inner = blob.view(blocks, count, -1).tensor_split([2 * BLOCK_ROWS * own], 2)
    supers = head.contiguous().view(torch.float16).float().view(blocks, count, own, 1, BLOCK_ROWS)
    inner = inner.reshape(blocks, count, each, -1, BLOCK_ROWS)
    if kind == "super":
        scale = inner[..., 0, :].view(torch.int8).float() * supers[:, :, 0]
        return by_row(scale.flatten(1, 2)), None
    if kind == "super-nibbles":
        inner = torch.cat([inner & 15, inner >> 4], -2)
    scale, minimum = (inner.float() * supers.transpose(2, 3)).unbind(-2)
    return by_row(scale.flatten(1, 2)), -by_row(minimum.flatten(1, 2))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Float32 numbers of E8M0 bytes."""
    ones = torch.ones(exponents.shape, device=exponents.device)
    return torch.ldexp(ones, exponents.int() - _E8M0_BIAS)


def _by_block(values_ND: Tensor) -> Tensor:
    """``(B, D, 16)``, contiguous."""
    padded = pad(values_ND, (0, 0, 0, -values_ND.shape[0] % BLOCK_ROWS))
    return padded.unflatten(0, (-1, BLOCK_ROWS)).transpose(1, 2).contiguous()
