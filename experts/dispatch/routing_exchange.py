"""The routing exchange: before rows travel, every rank tells every other where its tokens go.

Each message holds a header (place, shapes, dtype) and the first `INLINE_IDS` expert ids, enough for
decode steps. If a rank has more ids, all ids follow in a second all-to-all, whose sizes the headers
tell. Ids take a fraction of a percent of the rows' bytes. From the ids of all ranks each rank
computes the same assignment, exact sizes included.

A message may also have space for rows of hidden states (`InlineRows`). If the rows of all ranks fit
into theirs, dispatch needs no other exchange.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experts.dispatch.assignment import Ids
from experts.dispatch.exchange import Bytes, Exchange, ExchangeError, all_gather

INLINE_IDS = 512
"""Ids in the first message: of 64 tokens with 8 experts."""
_HEADER, _PLACE_BYTES = struct.Struct("<7q"), struct.calcsize("<2q")
"""Layer and epoch, which must be the same on all ranks, then a `RankHeader`."""
ID_BYTES = slice(_HEADER.size, _HEADER.size + 2 * INLINE_IDS)
"""Place of the ids in a message; inline rows follow."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

WASTE, SAME_MACHINE_WASTE = 1 / 16, 1 / 2
"""Largest share of inline rows that may go where they are not needed: between machines, and between
processes of one machine."""
REMEMBERED = 2
"""Layers whose headers are kept: two halves of a step take turns."""


class RankHeader(NamedTuple):
    """The header of one rank's message at a layer.

    Attributes:
        tokens, slots: the shape of its expert ids.
        dtype: of its hidden states, as an index.
        width: bytes of a token's row.
        inline_rows: rows that are in the message.
    """

    tokens: int
    slots: int
    dtype: int
    width: int
    inline_rows: int


@dataclass(frozen=True)
class RankHeaders:
    """The headers of all ranks, and what follows from them.

    Attributes:
        raw: the headers as bytes.
        ranks: the header of each rank.
        tokens_R: tokens of each rank.
        slots: largest number of slots.
        most_ids: largest number of ids of a rank.
        dtype: of the hidden states; None if no rank has tokens.
        inline_width: bytes of a row if the rows of all ranks are in the messages, else 0.
    """

    raw: bytes
    ranks: tuple[RankHeader, ...]
    tokens_R: list[int]
    slots: int
    most_ids: int
    dtype: torch.dtype | None
    inline_width: int


@dataclass
class GlobalRouting:
    """The routing of all ranks at a layer.

    Attributes:
        headers: of the messages.
        tables: expert ids ``(tokens, slots)`` of each rank; -1 for unused slots.
        rows: ``(tokens, W)`` bytes of each rank's rows; None if some were not inline.
        sent_bytes: that this rank sent, without rows.
    """

    headers: RankHeaders
    tables: list[Ids]
    rows: list[Bytes] | None
    sent_bytes: int


def exchange_routing(
    exchange: Exchange,
    place: tuple[int, int],
    expert_ids_TK: Tensor,
    dtype: torch.dtype,
    width: int,
    rows_TW: Tensor | None,
    space_R: Sequence[int],
    messages_R: Sequence[Bytes] | None = None,
) -> GlobalRouting:
    """Exchange expert ids, and rows where there is space; collective.

    Args:
        place: layer, and epoch of the placements.
        width: bytes of a token's row.
        rows_TW: the rows of all of this rank's tokens, to be sent inline; None: they do not fit.
        space_R: bytes for inline rows in each rank's message; the same on all ranks.
        messages_R: the messages of all ranks, if they have been exchanged already.

    Raises:
        ExchangeError: a rank is lost, is at another layer, has other placements or another dtype.
    """
    rank, ids_TK = exchange.rank, expert_ids_TK.contiguous()
    inline = 0 if rows_TW is None else len(rows_TW)
    header = _HEADER.pack(*place, *ids_TK.shape, _DTYPES.index(dtype), width, inline)
    if messages_R is None:
        message = _message(header, ids_TK, rows_TW, space_R[rank], max(exchange.size - 1, 1))
        messages_R = all_gather(exchange, message, [ID_BYTES.stop + space for space in space_R])
    headers = _compare(rank, messages_R)
    ids_R, sent = [one[ID_BYTES] for one in messages_R], ID_BYTES.stop
    if headers.most_ids > INLINE_IDS:
        own = ids_TK.to(torch.int16).view(-1).view(torch.uint8)
        sizes = [2 * one.tokens * one.slots for one in headers.ranks]
        ids_R = all_gather(exchange, own.repeat(max(exchange.size - 1, 1)), sizes)
        sent += len(own)
    tables, rows, row_bytes = [], [], headers.inline_width
    for ids, one, (tokens, slots, *_) in zip(ids_R, messages_R, headers.ranks, strict=True):
        tables.append(ids.view(np.int16)[: tokens * slots].reshape(tokens, slots))
        rows.append(one[ID_BYTES.stop :][: tokens * row_bytes].reshape(tokens, row_bytes))
    return GlobalRouting(headers, tables, rows if row_bytes else None, sent * (exchange.size - 1))


def exchange_headers(
    exchange: Exchange, place: tuple[int, int], shape: Sequence[int], dtype: torch.dtype
) -> RankHeaders:
    """Exchange headers alone, for ranks whose ids travel between their devices; collective.

    Args:
        exchange: between main memories.
        place: layer, and epoch of the placements.
        shape: of this rank's expert ids.
        dtype: of its hidden states.

    Raises:
        ExchangeError: as `exchange_routing`.
    """
    header = _HEADER.pack(*place, *shape, _DTYPES.index(dtype), 0, 0)
    own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    message = own.repeat(max(exchange.size - 1, 1))
    return _compare(exchange.rank, all_gather(exchange, message, [len(header)] * exchange.size))


def _compare(rank: int, messages_R: Sequence[Bytes]) -> RankHeaders:
    """The headers of all ranks, which must be at one place."""
    headers_R = [one[: _HEADER.size].tobytes() for one in messages_R]
    if any(other[:_PLACE_BYTES] != headers_R[rank][:_PLACE_BYTES] for other in headers_R):
        raise _out_of_step(rank, [_HEADER.unpack(other)[:2] for other in headers_R])
    return _parse(b"".join([other[_PLACE_BYTES:] for other in headers_R]))


def _message(
    header: bytes, ids_TK: Tensor, rows_TW: Tensor | None, space: int, copies: int
) -> Tensor:
    """``(copies * bytes,)``: the header, the first ids, and space with the rows, if there are."""
    one = torch.zeros(ID_BYTES.stop + space, dtype=torch.uint8)
    one[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    ids = ids_TK.reshape(-1)[:INLINE_IDS].to(torch.int16)
    one[ID_BYTES].view(torch.int16)[: len(ids)] = ids
    if rows_TW is not None:
        one[ID_BYTES.stop :][: rows_TW.numel()] = rows_TW.view(-1)
    return one.repeat(copies)


@lru_cache(maxsize=256)
def _parse(raw: bytes) -> RankHeaders:
    """Cached, as decode steps bring the same headers to every layer."""
    found = tuple(RankHeader(*fields) for fields in struct.iter_unpack("<5q", raw))
    widths = {header.width for header in found if header.tokens}
    all_inline = len(widths) == 1 and all(one.inline_rows >= one.tokens for one in found)
    codes = sorted({header.dtype for header in found if header.tokens})
    if len(codes) > 1:
        names = ", ".join(str(_DTYPES[code]) for code in codes)
        raise ExchangeError(f"ranks bring hidden states of different dtypes: {names}")
    return RankHeaders(
        raw=raw,
        ranks=found,
        tokens_R=[header.tokens for header in found],
        slots=max(header.slots for header in found),
        most_ids=max(header.tokens * header.slots for header in found),
        dtype=_DTYPES[codes[0]] if codes else None,
        inline_width=widths.pop() if all_inline else 0,
    )


def _out_of_step(rank: int, places: Sequence[tuple[int, ...]]) -> ExchangeError:
    """The error for ranks at different layers or epochs."""
    other, place = next(found for found in enumerate(places) if found[1] != places[rank])
    named = zip(("layer", "epoch"), places[rank], place, strict=True)
    name, mine, theirs = next(one for one in named if one[1] != one[2])
    return ExchangeError(
        f"the ranks are out of step: rank {rank} is at {name} {mine}, "
        f"rank {other} at {name} {theirs}"
    )


def should_inline_rows(ranks: int, slots: float, same_machine: bool) -> bool:
    """Return whether rows should go to all ranks with the ids, before it is known which ranks need
    them.

    That saves an exchange. Where each token visits several experts on few ranks, nearly every row
    is needed everywhere: with two ranks and eight experts, all but one in 256. On one machine a row
    costs less than a message, and compiled steps (`experts.dispatch.native`) need inline rows, so
    more of them may be wasted.
    """
    return (1 - 1 / ranks) ** slots <= (SAME_MACHINE_WASTE if same_machine else WASTE)


class InlineRows:
    """Decides how much space the messages of the next layer have for inline rows.

    That is the number of rows that ranks brought to the last layers, which all ranks know, so in a
    decode step like the one before no space is left empty.

    Args:
        ranks: how many there are.
        tokens: a fixed number of rows for every rank, whatever they bring; None: as above.
        same_machine: see `should_inline_rows`.
    """

    def __init__(self, ranks: int, tokens: int | None, same_machine: bool) -> None:
        self._ranks, self._fixed, self._same_machine = ranks, tokens, same_machine
        self._last: tuple[RankHeaders, ...] = ()
        self._space_R = [0] * ranks

    def bytes_R(self, width: int) -> Sequence[int]:
        """Bytes in each rank's message; the same on all ranks.

        Args:
            width: bytes of the widest possible row, for a fixed number of rows.
        """
        return self._space_R if self._fixed is None else [self._fixed * width] * self._ranks

    @property
    def steady(self) -> RankHeaders | None:
        """Headers of the ranks at each of the last layers, if they were the same."""
        last = self._last
        return last[0] if len(last) == REMEMBERED and last[0] is last[-1] else None

    def observe(self, headers: RankHeaders) -> None:
        """Add a layer."""
        last = (*self._last, headers)[-REMEMBERED:]
        if last != self._last:
            self._last, self._space_R = last, self._space(last)

    def _space(self, last: Sequence[RankHeaders]) -> list[int]:
        brought = [header for headers in last for header in headers.ranks if header.tokens]
        if not brought or max(one.tokens * one.slots for one in brought) > INLINE_IDS:
            return [0] * self._ranks
        if not should_inline_rows(
            self._ranks, min(one.slots for one in brought), self._same_machine
        ):
            return [0] * self._ranks
        widest = max(header.width for header in brought)
        return [widest * max(own) for own in zip(*(one.tokens_R for one in last), strict=True)]
