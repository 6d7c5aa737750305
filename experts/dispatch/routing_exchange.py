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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.dispatch.exchange import Exchange, ExchangeError

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int16]

INLINE = 512
"""Ids in the first message: of 64 tokens with 8 experts."""
_HEAD, _AT = struct.Struct("<7q"), struct.calcsize("<2q")
"""Layer and epoch, where all must be; and a `Head`."""
IDS = slice(_HEAD.size, _HEAD.size + 2 * INLINE)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Head(NamedTuple):
    """What each rank says of itself: a dtype by its number, bytes of a row, rows in the message."""

    tokens: int
    slots: int
    dtype: int
    width: int
    aboard: int


@dataclass(frozen=True)
class Meeting:
    """What follows from the heads of all ranks.

    Attributes:
        told: the heads as they travel.
        tokens_R: of each rank.
        slots: of the tokens that have most.
        most_ids: of a rank.
        dtype: of the hidden states; None where nobody has any.
        width: bytes of a token's row where those of all have come; 0 where not.
    """

    told: bytes
    heads: tuple[Head, ...]
    tokens_R: list[int]
    slots: int
    most_ids: int
    dtype: torch.dtype | None
    width: int


@dataclass
class Agreement:
    """What all ranks bring to a layer.

    Attributes:
        tables: expert ids ``(tokens, slots)`` of each rank; -1 for unused slots.
        rows: ``(tokens, W)`` bytes of each rank; None where those of some have not come.
        sent_bytes: that it took this rank, rows not counted.
    """

    meeting: Meeting
    tables: list[Ids]
    rows: list[Bytes] | None
    sent_bytes: int


def agree(
    exchange: Exchange,
    at: tuple[int, int],
    expert_ids_TK: Tensor,
    dtype: torch.dtype,
    width: int,
    rows_TW: Tensor | None,
    room_R: Sequence[int],
    told_R: Sequence[Bytes] | None = None,
) -> Agreement:
    """Tell all ranks about this rank's tokens, and hear about theirs; collective.

    Args:
        at: layer, and epoch of the placements.
        width: bytes of a token's row.
        rows_TW: those of all its tokens, sent along; None where there is no room for them.
        room_R: bytes for each rank's rows, known to all.
        told_R: messages of all ranks, where they have been exchanged.

    Raises:
        ExchangeError: a rank is lost, or at another layer, or has other placements.
    """
    rank, ids_TK = exchange.rank, expert_ids_TK.cpu().contiguous()
    rows_TW = None if rows_TW is None else rows_TW.cpu()
    aboard = 0 if rows_TW is None else len(rows_TW)
    head = _HEAD.pack(*at, *ids_TK.shape, _DTYPES.index(dtype), width, aboard)
    if told_R is None:
        message = _message(head, ids_TK, rows_TW, room_R[rank], max(exchange.size - 1, 1))
        told_R = _everybody(exchange, message, [IDS.stop + room for room in room_R])
    heads_R = [told[: _HEAD.size].tobytes() for told in told_R]
    if any(other[:_AT] != head[:_AT] for other in heads_R):
        raise _out_of_step(rank, [_HEAD.unpack(other)[:2] for other in heads_R])
    met = _meeting(b"".join([other[_AT:] for other in heads_R]))
    ids_R, sent = [told[IDS] for told in told_R], IDS.stop
    if met.most_ids > INLINE:
        own = ids_TK.to(torch.int16).view(-1).view(torch.uint8)
        sizes = [2 * one.tokens * one.slots for one in met.heads]
        ids_R = _everybody(exchange, own.repeat(max(exchange.size - 1, 1)), sizes)
        sent += len(own)
    tables, rows = [], []
    for ids, told, (tokens, slots, *_) in zip(ids_R, told_R, met.heads, strict=True):
        tables.append(ids.view(np.int16)[: tokens * slots].reshape(tokens, slots))
        rows.append(told[IDS.stop :][: tokens * met.width].reshape(tokens, met.width))
    return Agreement(met, tables, rows if met.width else None, sent * (exchange.size - 1))


def _message(head: bytes, ids_TK: Tensor, rows_TW: Tensor | None, room: int, copies: int) -> Tensor:
    """``(copies * bytes,)``: head, the first ids, and rows in a room of their own."""
    one = torch.zeros(IDS.stop + room, dtype=torch.uint8)
    one[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    ids = ids_TK.reshape(-1)[:INLINE].to(torch.int16)
    one[IDS].view(torch.int16)[: len(ids)] = ids
    if rows_TW is not None:
        one[IDS.stop :][: rows_TW.numel()] = rows_TW.view(-1)
    return one.repeat(copies)


@lru_cache(maxsize=256)
def _meeting(heads: bytes) -> Meeting:
    """Kept, as decode steps bring the same to every layer."""
    found = tuple(Head(*fields) for fields in struct.iter_unpack("<5q", heads))
    widths = {head.width for head in found if head.tokens}
    come = len(widths) == 1 and all(head.aboard >= head.tokens for head in found)
    codes = sorted({head.dtype for head in found if head.tokens})
    if len(codes) > 1:
        names = ", ".join(str(_DTYPES[code]) for code in codes)
        raise ExchangeError(f"ranks bring hidden states of different dtypes: {names}")
    return Meeting(
        told=heads,
        heads=found,
        tokens_R=[head.tokens for head in found],
        slots=max(head.slots for head in found),
        most_ids=max(head.tokens * head.slots for head in found),
        dtype=_DTYPES[codes[0]] if codes else None,
        width=widths.pop() if come else 0,
    )


def _everybody(exchange: Exchange, sent: Tensor, sizes_R: Sequence[int]) -> list[Bytes]:
    """What each rank tells all others, of these sizes.

    Args:
        sent: the own message, once for each other rank.
    """
    rank, from_R = exchange.rank, list(sizes_R)
    to_R = [from_R[rank]] * exchange.size
    to_R[rank] = from_R[rank] = 0
    received = torch.empty(sum(from_R), dtype=torch.uint8, device=exchange.device)
    leaving = sent if exchange.size > 1 else sent[:0]
    exchange.start(leaving.to(exchange.device), received, to_R, from_R)()
    told, start, parts = received.cpu().numpy(), 0, []
    for size in from_R:
        parts.append(told[start : start + size])
        start += size
    parts[rank] = sent.numpy()[: sizes_R[rank]]
    return parts


def _out_of_step(rank: int, places: Sequence[tuple[int, ...]]) -> ExchangeError:
    """Some are at another layer or epoch."""
    other, place = next(found for found in enumerate(places) if found[1] != places[rank])
    named = zip(("layer", "epoch"), places[rank], place, strict=True)
    name, mine, theirs = next(one for one in named if one[1] != one[2])
    return ExchangeError(
        f"the ranks are out of step: rank {rank} is at {name} {mine}, "
        f"rank {other} at {name} {theirs}"
    )


# ---- Whether rows go to all ranks along with the ids, before anybody knows who needs them.
#
# That saves an exchange. Where each token visits several experts of few ranks, nearly every row
# is needed everywhere: with two ranks and eight experts, all but one in 256. On one machine a row
# takes less than a message, and compiled steps (`at_once`) need rows that come with their ids, so
# more may come in vain. Room is kept for as many rows as ranks brought to the layers before,
# which all ranks know alike; in a step like the one before none of it stays empty.

WASTE, NEAR_WASTE = 1 / 16, 1 / 2
"""Most rows that may go where nobody needs them, as a share; and between processes of a machine."""
MEETINGS = 2
"""That are looked back to: halves of a step take turns."""


def rows_go_along(ranks: int, slots: float, near: bool) -> bool:
    """Whether enough tokens with so many slots need all ranks, wherever experts are."""
    return (1 - 1 / ranks) ** slots <= (NEAR_WASTE if near else WASTE)


class Rooms:
    """Room for rows in the messages of the next layer.

    Args:
        ranks: how many there are.
        tokens: whose rows have room on every rank, whatever is brought; None: see above.
        near: rows are waste only where they are many; the same on all ranks.
    """

    def __init__(self, ranks: int, tokens: int | None, near: bool) -> None:
        self._ranks, self._fixed, self._near = ranks, tokens, near
        self._seen: tuple[Meeting, ...] = ()
        self._room_R = [0] * ranks

    def bytes_R(self, width: int) -> Sequence[int]:
        """For each rank; the same on all.

        Args:
            width: bytes of the longest row that there can be, for static room.
        """
        return self._room_R if self._fixed is None else [self._fixed * width] * self._ranks

    @property
    def steady(self) -> Meeting | None:
        """What ranks have brought to the last layers, if always the same."""
        seen = self._seen
        return seen[0] if len(seen) == MEETINGS and seen[0] is seen[-1] else None

    def saw(self, meeting: Meeting) -> None:
        """What ranks have brought to a layer."""
        seen = (*self._seen, meeting)[-MEETINGS:]
        if seen != self._seen:
            self._seen, self._room_R = seen, self._room(seen)

    def _room(self, seen: Sequence[Meeting]) -> list[int]:
        brought = [head for meeting in seen for head in meeting.heads if head.tokens]
        if not brought or max(head.tokens * head.slots for head in brought) > INLINE:
            return [0] * self._ranks
        if not rows_go_along(self._ranks, min(head.slots for head in brought), self._near):
            return [0] * self._ranks
        longest = max(head.width for head in brought)
        return [longest * max(own) for own in zip(*(one.tokens_R for one in seen), strict=True)]
