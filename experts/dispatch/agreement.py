"""Before rows travel, every rank tells every other which experts its tokens want.

A message of fixed size has what must agree and the ids of a few tokens, enough for decode steps;
where a rank has more, all ids follow in a second exchange whose sizes are known by then. Ids are
a fraction of a per cent of the rows; with those of everybody, each rank works out the same
assignment, exact sizes included. There may be room for rows in the message too: where they fit on
every rank, no other exchange is needed for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.dispatch.exchange import Exchange, ExchangeError

Ids = NDArray[np.int16]
Head = tuple[int, ...]
"""Layer, epoch, tokens, slots, code of the dtype, bytes of a row that came along."""

INLINE = 512
"""Ids in the first message: of 64 tokens with 8 experts."""
_HEAD = struct.Struct("<6q")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Agreement:
    """What all ranks bring to a layer.

    Attributes:
        experts_R: ``(T_r, K)`` expert ids of each rank's tokens, -1 for unused slots.
        dtype: of the hidden states; this rank's own where nobody has any.
        rows: ``(T of all ranks, W)`` bytes, by rank; None where they do not all fit.
        sent_bytes: that it took this rank, rows not counted.
    """

    experts_R: list[Ids]
    dtype: torch.dtype
    rows: NDArray[np.uint8] | None
    sent_bytes: int


def agree(
    exchange: Exchange,
    layer: int,
    epoch: int,
    expert_ids_TK: Tensor,
    dtype: torch.dtype,
    rows_TW: Tensor | None = None,
    room: int = 0,
) -> Agreement:
    """Tell all ranks about this rank's tokens, and hear about theirs; collective.

    Args:
        rows_TW: bytes of its tokens, sent along if there is room.
        room: bytes, the same on every rank.

    Raises:
        ExchangeError: a rank is lost, or at another layer, or has other placements.
    """
    own = expert_ids_TK.cpu().numpy().astype(np.int16)
    aboard = b""
    if rows_TW is not None and rows_TW.numel() <= room:
        aboard = rows_TW.cpu().numpy().tobytes()
    width = len(aboard) // max(1, len(own))
    head = _HEAD.pack(layer, epoch, *own.shape, _DTYPES.index(dtype), width)
    ids = own.tobytes()[: 2 * INLINE].ljust(2 * INLINE, b"\0")
    message = head + ids + aboard.ljust(room, b"\0")
    messages = _everybody(exchange, message, [len(message)] * exchange.size)
    heads = [_HEAD.unpack_from(told) for told in messages]
    _check(exchange.rank, heads)
    sizes = [tokens * slots for _, _, tokens, slots, *_ in heads]
    sent = len(message) - len(aboard)
    if max(sizes) > INLINE:
        tables = _everybody(exchange, own.tobytes(), [2 * size for size in sizes])
        sent += own.nbytes
    else:
        tables = [told[_HEAD.size :] for told in messages]
    experts_R = [
        np.frombuffer(told, np.int16, size).reshape(head[2:4])
        for told, size, head in zip(tables, sizes, heads, strict=True)
    ]
    rows = _aboard(messages, heads) if room else None
    chosen = _common_dtype(heads) or dtype
    return Agreement(_same_width(experts_R), chosen, rows, sent * (exchange.size - 1))


def _aboard(messages: Sequence[bytes], heads: Sequence[Head]) -> NDArray[np.uint8] | None:
    """Rows that came with the messages, if those of all tokens did."""
    widths = {width for _, _, tokens, _, _, width in heads if tokens}
    if len(widths) != 1 or 0 in widths:
        return None
    width, start = widths.pop(), _HEAD.size + 2 * INLINE
    parts = [
        np.frombuffer(told, np.uint8, head[2] * width, start).reshape(-1, width)
        for told, head in zip(messages, heads, strict=True)
    ]
    return np.concatenate(parts)


def _common_dtype(heads: Sequence[Head]) -> torch.dtype | None:
    """Of the hidden states of all tokens; None without tokens."""
    codes = sorted({code for _, _, tokens, _, code, _ in heads if tokens})
    if len(codes) > 1:
        names = ", ".join(str(_DTYPES[code]) for code in codes)
        raise ExchangeError(f"ranks bring hidden states of different dtypes: {names}")
    return _DTYPES[codes[0]] if codes else None


def _everybody(exchange: Exchange, own: bytes, sizes_R: Sequence[int]) -> list[bytes]:
    """What each rank tells all others, of these sizes."""
    rank, others = exchange.rank, exchange.size - 1
    to_R, from_R = [len(own)] * exchange.size, list(sizes_R)
    to_R[rank] = from_R[rank] = 0
    sent = torch.frombuffer(bytearray(own * others or b"\0"), dtype=torch.uint8)[: sum(to_R)]
    received = torch.empty(sum(from_R), dtype=torch.uint8, device=exchange.device)
    exchange.start(sent.to(exchange.device), received, to_R, from_R)()
    told, start, parts = received.cpu().numpy().tobytes(), 0, []
    for size in from_R:
        parts.append(told[start : start + size])
        start += size
    parts[rank] = own
    return parts


def _check(rank: int, heads: Sequence[Head]) -> None:
    for other, head in enumerate(heads):
        for name, mine, theirs in zip(("layer", "epoch"), heads[rank], head, strict=False):
            if mine != theirs:
                raise ExchangeError(
                    f"the ranks are out of step: rank {rank} is at {name} {mine}, "
                    f"rank {other} at {name} {theirs}"
                )


def _same_width(tables: list[Ids]) -> list[Ids]:
    """With unused slots in those that have fewer."""
    slots = max(table.shape[1] for table in tables)
    return [
        np.pad(table, ((0, 0), (0, slots - table.shape[1])), constant_values=-1)
        if table.shape[1] < slots
        else table
        for table in tables
    ]
