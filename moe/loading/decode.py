"""The arithmetic of quantised checkpoints: stored tensors of one weight in, float32 out.

Every function gives the exact products of codes and scales; what is rounded, and to what, is up to
whoever keeps the result. Legend: N rows (outputs), K columns (inputs), D groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each 4-bit field of a word holds, lowest field first (AutoAWQ's GEMM packing)."""


def decode_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """``(..., N, K)`` float8 times one scale for each block of rows and columns.

    Scales of one byte are exponents (E8M0).
    """
    rows, columns = weight.shape[-2:]
    spread = _e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
    spread = spread.repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float() * spread.repeat_interleave(block[1], -1)[..., :columns]


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """``(E, N, D, 16)`` bytes of two numbers each, low one first, to ``(E, K, N)``.

    The result is transposed, as transformers' own decoder does for these checkpoints.
    """
    values = torch.tensor(_FP4 + tuple(-value for value in _FP4))
    fields = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    decoded = values[fields.int()] * _e8m0(scales)[..., None]
    return decoded.flatten(-2).transpose(-2, -1).contiguous()


def decode_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, bits: int, zero_offset: int
) -> Tensor:
    """``(K / f, N)``, ``(D, N / f)`` words, ``(D, N)`` scales and the group of each column."""
    codes_KN = _fields(qweight, bits).transpose(1, 2).flatten(0, 1)
    zeros_DN = _fields(qzeros, bits).flatten(1) + zero_offset
    group = g_idx.long()
    return ((codes_KN - zeros_DN[group]) * scales.float()[group]).T.contiguous()


def decode_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """``(K, N / 8)``, ``(D, N / 8)`` words and ``(D, N)`` scales."""
    codes_KN = _unscramble(_fields(qweight, 4)).flatten(1)
    zeros_DN = _unscramble(_fields(qzeros, 4)).flatten(1)
    repeat = codes_KN.shape[0] // scales.shape[0]
    spread = scales.float().repeat_interleave(repeat, 0)
    return ((codes_KN - zeros_DN.repeat_interleave(repeat, 0)) * spread).T.contiguous()


def decode_packed(packed: Tensor, scales: Tensor, columns: int, bits: int) -> Tensor:
    """``(N, K / f)`` words of codes around ``2 ** (bits - 1)`` and ``(N, D)`` scales."""
    codes_NK = _fields(packed, bits).flatten(1)[:, :columns] - 2 ** (bits - 1)
    return codes_NK * scales.float().repeat_interleave(columns // scales.shape[1], 1)


def _fields(words: Tensor, bits: int) -> Tensor:
    """``(..., 32 / bits)`` numbers in float32 that int32 words hold, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).float()


def _unscramble(fields: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_ORDER).argsort()
    return fields[..., places]


def _e8m0(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - _E8M0_BIAS)
