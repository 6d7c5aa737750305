"""Rows as they travel: hidden states with or without weights, and results or why there are none.

Legend: N rows, H hidden, K slots, W bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from experts.dispatch.base import Combined, DispatchStatistics, Failure, Failures
from experts.dispatch.exchange import Exchange, ExchangeError

Payload = Literal["plain", "int8"]

_FAILED = 8
"""First bytes of a row that failed, all ones: a NaN of any dtype that no arithmetic makes. What
kind of failure it is follows, and the text."""
_TEXT = _FAILED + 1


def pack(hidden_NH: Tensor, weights_NK: Tensor | None, payload: Payload) -> Tensor:
    """``(N, W)`` bytes: hidden states as they are or in 8 bits with a scale, then weights."""
    parts = [hidden_NH] if payload == "plain" else list(quantize(hidden_NH))
    if weights_NK is not None:
        parts.append(weights_NK)
    blobs = [part.contiguous().view(torch.uint8) for part in parts]
    return blobs[0] if len(blobs) == 1 else torch.cat(blobs, 1)


def width(hidden: int, dtype: torch.dtype, slots: int, payload: Payload) -> int:
    """Bytes of a row, with so many weights."""
    return (hidden * dtype.itemsize if payload == "plain" else hidden + 4) + 4 * slots


def room_for(hidden: int) -> int:
    """Bytes that hold a row of any payload, with the weights of 64 slots."""
    return 4 * hidden + 256


def unpack(bytes_NW: Tensor, hidden: int, dtype: torch.dtype, payload: Payload) -> Tensor:
    """Hidden states ``(N, H)``: `pack` undone."""
    if payload == "plain":
        size = hidden * dtype.itemsize
        whole = bytes_NW.shape[1] == size and bytes_NW.numel()
        return bytes_NW.view(dtype) if whole else _read(bytes_NW[:, :size], dtype)
    codes_NH = _read(bytes_NW[:, :hidden], torch.int8)
    return dequantize(codes_NH, _read(bytes_NW[:, hidden : hidden + 4], torch.float32), dtype)


def unpack_weights(bytes_NW: Tensor, slots: int) -> Tensor:
    """``(N, K)``, of rows that have them."""
    return _read(bytes_NW[:, bytes_NW.shape[1] - 4 * slots :], torch.float32)


def quantize(hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and a float32 scale ``(N, 1)`` a row: its largest magnitude becomes 127."""
    rows = hidden_NH.float()
    scale_N1 = rows.abs().amax(1, keepdim=True) / 127 if rows.numel() else rows.new_zeros(0, 1)
    codes = torch.round(rows / scale_N1.where(scale_N1 != 0, 1.0)).nan_to_num(0.0)
    return codes.clamp(-127, 127).to(torch.int8), scale_N1


def dequantize(codes_NH: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_NH.float() * scale_N1).to(dtype)


def write_failures(rows_NH: Tensor, rank: int, failures: Failures) -> None:
    """Put into rows of a rank that there is no result, and as much of why as there is room for."""
    for index, failure in failures.items():
        blob = rows_NH[index].view(torch.uint8).numpy()
        words = f"rank {rank}: {failure.reason}".encode(errors="replace")[: len(blob) - _TEXT]
        blob[:] = 0
        blob[:_FAILED], blob[_FAILED] = 255, failure.unreadable
        blob[_TEXT : _TEXT + len(words)] = list(words)


def combined(
    total_TH: Tensor, nan: bool, position_TK: Tensor, come: Tensor, stay: Tensor
) -> Combined:
    """Sums of rows, of which some may have failed.

    Args:
        nan: whether any sum begins with NaN; with a row that failed, it does.
        position_TK: of each token's rows in those that came and then those that stayed.
    """
    failures: dict[int, Failure] = {}
    for index, failure in (read_failures(come, stay) if nan else {}).items():
        for token in (position_TK == index).any(1).nonzero()[:, 0].tolist():
            failures.setdefault(token, failure)
    if failures:
        total_TH[list(failures)] = 0
    return Combined(total_TH, failures)


def read_failures(*rows_NH: Tensor) -> dict[int, Failure]:
    """Rows that failed, counted on from one tensor to the next, and why."""
    blobs = torch.cat([rows.view(torch.uint8) for rows in rows_NH])
    failed = (blobs[:, :_FAILED] == 255).all(1).nonzero()[:, 0].tolist()
    reasons = {}
    for index in failed:
        unreadable, *words = blobs[index, _FAILED:].tolist()
        text = bytes(words).rstrip(b"\0").decode(errors="ignore")
        reasons[index] = Failure(text, bool(unreadable))
    return reasons


def _read(bytes_NW: Tensor, dtype: torch.dtype) -> Tensor:
    # A slice's rows lie where a wider type cannot; and torch views no empty rows as such a type.
    shape = len(bytes_NW), bytes_NW.shape[1] // dtype.itemsize
    values = torch.empty(shape, dtype=dtype, device=bytes_NW.device)
    if values.numel():
        values.view(torch.uint8).copy_(bytes_NW)
    return values


# ---- The time that a rank spends with the others, and what has ended it.


class Together:
    """Time spent with the other ranks; what ends there has ended for good."""

    def __init__(self, statistics: DispatchStatistics) -> None:
        self._statistics = statistics
        self.broken: ExchangeError | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def __enter__(self) -> None:
        if self.broken is not None:
            raise self.broken
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._statistics.seconds += time.perf_counter() - self._began
        if isinstance(error, ExchangeError):
            self.broken = error

    def start(
        self, exchange: Exchange, message: Tensor, send_R: Sequence[int], receive_R: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send rows of bytes to the others; theirs, there after the wait."""
        to_R, from_R = [*send_R], [*receive_R]
        to_R[exchange.rank] = from_R[exchange.rank] = 0
        received = message.new_empty(sum(from_R), message.shape[1])
        with self:
            wait = exchange.start(message, received, to_R, from_R)
        return received, wait
