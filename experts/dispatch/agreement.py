"""Before rows travel, every rank tells every other which experts its tokens want.

A message has what must agree and the ids of a few tokens, enough for decode steps; where a rank has
more, all ids follow in a second exchange whose sizes are known by then. Ids are a fraction of a per
cent of the rows; with those of everybody, each rank works out the same assignment, exact sizes
included. There may be room for rows in the message too (`rooms`): where those of all ranks fit, no
other exchange is needed for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.dispatch.assignment import Ints
from experts.dispatch.exchange import Exchange, ExchangeError

Bytes = NDArray[np.uint8]

INLINE = 512
"""Ids in the first message: of 64 tokens with 8 experts."""
_HEAD = struct.Struct("<7q")
_IDS = slice(_HEAD.size, _HEAD.size + 2 * INLINE)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Head(NamedTuple):
    """What each rank says of itself: a dtype by its number, bytes of a row, rows in the message."""

    layer: int
    epoch: int
    tokens: int
    slots: int
    dtype: int
    width: int
    aboard: int


@dataclass(frozen=True)
class Agreement:
    """What all ranks bring to a layer.

    Attributes:
        heads: of all ranks.
        experts_TK: expert ids of the tokens of all ranks, by rank; -1 for unused slots.
        dtype: of the hidden states; this rank's own where nobody has any.
        rows: ``(T, W)`` bytes of all tokens; None where they do not all fit.
        sent_bytes: that it took this rank, rows not counted.
    """

    heads: list[Head]
    experts_TK: Ints
    dtype: torch.dtype
    rows: Bytes | None
    sent_bytes: int

    @property
    def tokens_R(self) -> list[int]:
        return [head.tokens for head in self.heads]


def agree(
    exchange: Exchange,
    at: tuple[int, int],
    expert_ids_TK: Tensor,
    dtype: torch.dtype,
    width: int,
    rows_TW: Tensor | None,
    room_R: Sequence[int],
) -> Agreement:
    """Tell all ranks about this rank's tokens, and hear about theirs; collective.

    Args:
        at: layer, and epoch of the placements.
        width: bytes of a token's row.
        rows_TW: those of all its tokens, sent along; None where there is no room for them.
        room_R: bytes for each rank's rows, known to all.

    Raises:
        ExchangeError: a rank is lost, or at another layer, or has other placements.
    """
    rank, own = exchange.rank, expert_ids_TK.cpu().numpy().astype(np.int16)
    aboard = 0 if rows_TW is None else len(rows_TW)
    message = np.empty(_IDS.stop + room_R[rank], np.uint8)
    tokens, slots = own.shape
    head = Head(*at, tokens, slots, _DTYPES.index(dtype), width, aboard)
    _HEAD.pack_into(message.data, 0, *head)
    inline = own.reshape(-1)[:INLINE]
    message[_IDS].view(np.int16)[: len(inline)] = inline
    if rows_TW is not None:
        message[_IDS.stop :][: rows_TW.numel()] = rows_TW.cpu().numpy().reshape(-1)
    messages = _everybody(exchange, message, [_IDS.stop + room for room in room_R])
    heads = [Head(*_HEAD.unpack_from(told.data)) for told in messages]
    _check(rank, heads)
    tables, sent = [told[_IDS] for told in messages], _IDS.stop
    if max(head.tokens * head.slots for head in heads) > INLINE:
        sizes = [2 * head.tokens * head.slots for head in heads]
        tables = _everybody(exchange, own.reshape(-1).view(np.uint8), sizes)
        sent += own.nbytes
    return Agreement(
        heads=heads,
        experts_TK=_joined(tables, heads),
        dtype=_common_dtype(heads) or dtype,
        rows=_aboard(messages, heads),
        sent_bytes=sent * (exchange.size - 1),
    )


def _joined(tables: Sequence[Bytes], heads: Sequence[Head]) -> Ints:
    """Ids of all ranks, with unused slots for those that have fewer."""
    tokens, slots = sum(head.tokens for head in heads), max(head.slots for head in heads)
    ids_TK, start = np.full((tokens, slots), -1), 0
    for table, head in zip(tables, heads, strict=True):
        own = table[: 2 * head.tokens * head.slots].view(np.int16)
        ids_TK[start : start + head.tokens, : head.slots] = own.reshape(head.tokens, head.slots)
        start += head.tokens
    return ids_TK


def _aboard(messages: Sequence[Bytes], heads: Sequence[Head]) -> Bytes | None:
    """Rows that came with the messages, if those of all tokens did."""
    widths = {head.width for head in heads if head.tokens}
    if len(widths) != 1 or any(head.aboard < head.tokens for head in heads):
        return None
    width = widths.pop()
    parts = [
        told[_IDS.stop : _IDS.stop + head.tokens * width]
        for told, head in zip(messages, heads, strict=True)
    ]
    return np.concatenate(parts).reshape(-1, width)


def _common_dtype(heads: Sequence[Head]) -> torch.dtype | None:
    """Of the hidden states of all tokens; None without tokens."""
    codes = sorted({head.dtype for head in heads if head.tokens})
    if len(codes) > 1:
        names = ", ".join(str(_DTYPES[code]) for code in codes)
        raise ExchangeError(f"ranks bring hidden states of different dtypes: {names}")
    return _DTYPES[codes[0]] if codes else None


def _everybody(exchange: Exchange, own: Bytes, sizes_R: Sequence[int]) -> list[Bytes]:
    """What each rank tells all others, of these sizes."""
    rank, others = exchange.rank, exchange.size - 1
    to_R, from_R = [len(own)] * exchange.size, list(sizes_R)
    to_R[rank] = from_R[rank] = 0
    sent = torch.from_numpy(own if others == 1 else np.tile(own, others))
    received = torch.empty(sum(from_R), dtype=torch.uint8, device=exchange.device)
    exchange.start(sent.to(exchange.device), received, to_R, from_R)()
    told, start, parts = received.cpu().numpy(), 0, []
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
