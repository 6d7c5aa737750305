"""The wire format of rows: hidden states with or without weights, and results or failures.

Legend: N rows, H hidden, K slots, W bytes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from experts.dispatch.base import Combined, Failure, Failures

Payload = Literal["plain", "int8"]

_FAILED = 8
"""A failed row begins with this many bytes of all ones, which is a NaN in any dtype and one that no
arithmetic makes. A byte for `Failure.unreadable` and the reason follow."""
_TEXT = _FAILED + 1


def pack(hidden_NH: Tensor, weights_NK: Tensor | None, payload: Payload) -> Tensor:
    """``(N, W)`` bytes: hidden states as they are or as int8 with a scale, then weights."""
    parts = [hidden_NH] if payload == "plain" else list(quantize(hidden_NH))
    if weights_NK is not None:
        parts.append(weights_NK)
    blobs = [part.contiguous().view(torch.uint8) for part in parts]
    return blobs[0] if len(blobs) == 1 else torch.cat(blobs, 1)


def width(hidden: int, dtype: torch.dtype, slots: int, payload: Payload) -> int:
    """Bytes W of a row with the weights of this many slots."""
    return (hidden * dtype.itemsize if payload == "plain" else hidden + 4) + 4 * slots


def widest(hidden: int) -> int:
    """Bytes that are enough for a row of any payload with the weights of 64 slots."""
    return 4 * hidden + 256


def unpack(bytes_NW: Tensor, hidden: int, dtype: torch.dtype, payload: Payload) -> Tensor:
    """Hidden states ``(N, H)``: the inverse of `pack`."""
    if payload == "plain":
        size = hidden * dtype.itemsize
        whole = bytes_NW.shape[1] == size and bytes_NW.numel()
        return bytes_NW.view(dtype) if whole else read(bytes_NW[:, :size], dtype)
    codes_NH = read(bytes_NW[:, :hidden], torch.int8)
    return dequantize(codes_NH, read(bytes_NW[:, hidden : hidden + 4], torch.float32), dtype)


def unpack_weights(bytes_NW: Tensor, slots: int) -> Tensor:
    """``(N, K)`` weights of rows that were packed with them."""
    return read(bytes_NW[:, bytes_NW.shape[1] - 4 * slots :], torch.float32)


def quantize(hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and a float32 scale ``(N, 1)`` a row: its largest magnitude becomes 127."""
    rows = hidden_NH.float()
    scale_N1 = rows.abs().amax(1, keepdim=True) / 127 if rows.numel() else rows.new_zeros(0, 1)
    codes = torch.round(rows / scale_N1.where(scale_N1 != 0, 1.0)).nan_to_num(0.0)
    return codes.clamp(-127, 127).to(torch.int8), scale_N1


def dequantize(codes_NH: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_NH.float() * scale_N1).to(dtype)


def write_failures(rows_NH: Tensor, rank: int, failures: Failures) -> None:
    """Overwrite failed rows with the failure, its reason cut to what fits."""
    for index, failure in failures.items():
        blob = rows_NH[index].view(torch.uint8)  # on any device
        words = f"rank {rank}: {failure.reason}".encode(errors="replace")[: len(blob) - _TEXT]
        text = bytes([255] * _FAILED + [failure.unreadable]) + words
        padded = torch.tensor(list(text.ljust(len(blob), b"\0")), dtype=torch.uint8)
        blob.copy_(padded, non_blocking=True)


def combined(
    total_TH: Tensor, nan: bool, position_TK: Tensor, received: Tensor, own: Tensor
) -> Combined:
    """Sums of rows, with the failures among the rows taken out.

    Args:
        nan: whether any sum begins with NaN; one with a failed row does.
        position_TK: of each token's rows in the received rows with this rank's own behind them.
    """
    failures: dict[int, Failure] = {}
    for index, failure in (read_failures(received, own) if nan else {}).items():
        for token in (position_TK == index).any(1).nonzero()[:, 0].tolist():
            failures.setdefault(token, failure)
    if failures:
        total_TH[list(failures)] = 0
    return Combined(total_TH, failures)


def read_failures(*rows_NH: Tensor) -> dict[int, Failure]:
    """Failures by row, rows numbered on from one tensor to the next."""
    blobs = torch.cat([rows.view(torch.uint8) for rows in rows_NH])
    failed = (blobs[:, :_FAILED] == 255).all(1).nonzero()[:, 0].tolist()
    reasons = {}
    for index in failed:
        unreadable, *words = blobs[index, _FAILED:].tolist()
        text = bytes(words).rstrip(b"\0").decode(errors="ignore")
        reasons[index] = Failure(text, bool(unreadable))
    return reasons


_RANK_BITS = 15
"""Bits of the rank in a failure's code: 1, whether it is unreadable, the rank, the layer."""


def row_codes(rows_NH: Tensor, rank: Tensor | int) -> Tensor:
    """``(N,)`` int64 codes of rows ``(..., H)``, without their layer; 0 for rows that have not
    failed. Nothing is read back.

    Args:
        rank: that sent each row, in a shape that broadcasts.
    """
    if rows_NH.shape[-1] * rows_NH.dtype.itemsize < _TEXT:  # no row of a model is so narrow
        return torch.zeros(rows_NH.shape[:-1], dtype=torch.int64, device=rows_NH.device)
    marks = rows_NH.contiguous().view(torch.uint8)[..., :_TEXT].long()
    failed = (marks[..., :_FAILED] == 255).all(-1)
    return failed * (2 + marks[..., _FAILED] + 2 * rank)


def code_of(failure: Failure, rank: int) -> int:
    """The code of a rank's failure, as of `row_codes`; below 2^16."""
    return 2 + failure.unreadable + 2 * rank


def layer_code(layer: int) -> int:
    """Return the part of a layer in the codes of its failures."""
    return layer << (_RANK_BITS + 1)


def failure(code: int) -> Failure:
    """Return the meaning of a code that is not 0."""
    layer, rest = divmod(code, 1 << (_RANK_BITS + 1))
    rank, unreadable = divmod(rest - 2, 2)
    act = "read" if unreadable else "run"
    return Failure(f"rank {rank} could not {act} an expert of MoE layer {layer}", bool(unreadable))


def read(bytes_NW: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``(N, W / itemsize)`` of bytes ``(N, W)``."""
    # A slice may be unaligned for a wider type, and torch cannot view empty rows as one.
    shape = len(bytes_NW), bytes_NW.shape[1] // dtype.itemsize
    values = torch.empty(shape, dtype=dtype, device=bytes_NW.device)
    if values.numel():
        values.view(torch.uint8).copy_(bytes_NW)
    return values
