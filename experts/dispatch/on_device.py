"""The way of a token to other ranks and back in tensor operations on the rows' own device.

`DeviceDispatcher` is for GPUs, whose host must not wait at each layer. The ids, which rank serves
which slot (`DeviceCopies`), the order of rows and the counters stay on the device. The hosts tell
each other only how many tokens each rank brings (`exchange_headers`), while the devices work. Then
rows travel in one of two ways:

- Fixed sizes (`_FixedRows`), for up to ``buffer_rows`` tokens a rank, as in decode steps: each rank
  sends its rows with their ids to all ranks, and each returns one row a token. All sizes follow
  from the headers, so nothing is read back.
- Exact sizes (`_ExactRows`), for prompts: ids first, then each row goes to the ranks that serve it.
  The sizes are the one thing that is read back. In "exact" mode, whose results travel for each slot
  and are summed in the order of one rank, all rows go this way.

Rows that fail are marked in what they send back (`experts.dispatch.rows`); each token's rank notes
it in codes, which are read at the end of the step.

Legend: T tokens of this rank, N of all ranks or those it serves, K slots, H hidden, R ranks,
W bytes of a row, A slots that this rank serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.dispatch import rows as wire
from experts.dispatch.base import (
    CollectiveGuard,
    Combined,
    CombineMode,
    Dispatched,
    DispatchStatistics,
    FailureCodes,
    Failures,
    RankDispatcher,
)
from experts.dispatch.copies import DeviceCopies
from experts.dispatch.exchange import Exchange
from experts.dispatch.routing_exchange import exchange_headers
from experts.placement import Placement
from kernels import weighted_sum
from routing import Routing
from routing.routing import UNUSED, counted

Wait = Callable[[], None]

BUFFER_ROWS = 256
"""Most tokens of a rank whose rows go to all ranks: more take longer to send than sizes to read
back, at some 4 KB a row. An estimate; no GPU has measured it."""
_ID_BYTES = 2


class RowKind(NamedTuple):
    """Shape and dtype of a model's rows.

    Attributes:
        hidden: H.
        slots: K, the experts of a token.
        dtype: of hidden states.
    """

    hidden: int
    slots: int
    dtype: torch.dtype


class DeviceDispatcher(RankDispatcher["DeviceDispatched"]):
    """The `RankDispatcher` of rows on a device.

    Args:
        exchange: connects the ranks' devices.
        host: connects their hosts.
        placements: see `RankDispatcher`.
        combine: "summed": one row comes back for each token and rank. "exact": one a slot.
        payload: of hidden states: "plain", or "int8" with a scale for each token.
        buffer_rows: see above; None: `BUFFER_ROWS`.
    """

    name = "device"

    def __init__(
        self,
        exchange: Exchange,
        host: Exchange,
        placements: Sequence[Placement],
        *,
        combine: CombineMode = "summed",
        payload: wire.Payload = "plain",
        buffer_rows: int | None = None,
    ) -> None:
        super().__init__(exchange, placements)
        self._host, self._exact, self._payload = host, combine == "exact", payload
        self._buffer_rows = BUFFER_ROWS if buffer_rows is None else buffer_rows
        self._copies = [DeviceCopies(one, exchange.device) for one in self.placements]
        experts = max((one.num_experts for one in placements), default=0)
        self._counts = _DeviceCounts(len(placements), experts, exchange)

    def apply_placements(self, epoch: int, placements: Mapping[int, Placement]) -> None:
        super().apply_placements(epoch, placements)
        for layer in placements:
            self._copies[layer] = DeviceCopies(self.placements[layer], self._exchange.device)

    @property
    def statistics(self) -> DispatchStatistics:
        """Count what was moved; reads the device's counters back."""
        self._counts.move_to(self._statistics)
        return self._statistics

    def start_dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Flight:
        exchange, place = self._exchange, (layer, self.epoch)
        with self._guard:
            headers = exchange_headers(
                self._host, place, routing.expert_ids.shape, hidden_states.dtype
            )
        dtype, device = headers.dtype or hidden_states.dtype, exchange.device
        more = headers.slots - routing.top_k
        own = OwnTokens(
            hidden_states.to(device, dtype),
            pad(routing.expert_ids.to(device), (0, more), value=UNUSED),
            pad(routing.weights.to(device), (0, more)),
        )
        links = Links(exchange, self._guard, headers.tokens_R, self._payload)
        counts = self._counts.of(layer, own, self._statistics)
        if self._exact or max(headers.tokens_R) > self._buffer_rows:
            return self._exact_rows(layer, own, links, counts)
        return _FixedRows(layer, own, links, self._copies[layer], counts)

    def _exact_rows(self, layer: int, own: OwnTokens, links: Links, counts: LayerCounts) -> Flight:
        """Send rows to the ranks that serve them alone."""
        return _ExactRows(layer, own, links, self._copies[layer], counts, self._exact)

    def finish_dispatch(self, flight: Flight) -> DeviceDispatched:
        rows, routing = flight.arrive()
        return DeviceDispatched(flight.layer, rows, routing, True, flight)

    def start_combine(
        self, dispatched: DeviceDispatched, rows: Tensor, failures: Failures
    ) -> Flight:
        flight = dispatched.flight
        self._statistics.bytes_back += flight.send_back(rows, failures)
        return flight

    def finish_combine(self, flight: Flight) -> Combined:
        total_TH, rank_codes = flight.total()
        failed_T = rank_codes > 0
        codes_T = torch.where(failed_T, rank_codes + wire.layer_code(flight.layer), 0)
        total_TH = total_TH.masked_fill_(failed_T[:, None], 0)
        return Combined(total_TH, codes=FailureCodes(codes_T, self._exchange.settle))


class Flight(Protocol):
    """Rows of one layer on their way out and back; another library may carry them.

    Attributes:
        layer: MoE layer.
    """

    layer: int

    def arrive(self) -> tuple[Tensor, Routing]:
        """Wait for the rows that this rank serves; their routing has its own experts alone."""
        ...

    def send_back(self, rows: Tensor, failures: Failures) -> int:
        """Begin to return results, in the order of `arrive`; returns the bytes sent."""
        ...

    def total(self) -> tuple[Tensor, Tensor]:
        """Wait for the results: ``(T, H)`` sums of this rank's tokens, and ``(T,)`` codes of those
        that failed, as of `experts.dispatch.rows.row_codes`."""
        ...


@dataclass
class DeviceDispatched(Dispatched):
    """Rows that this rank serves."""

    flight: Flight


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of this rank: ``(T, H)`` rows, ``(T, K)`` ids and weights."""

    hidden_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True)
class Links:
    """The exchange, and what the headers say.

    Attributes:
        tokens_R: tokens of each rank.
    """

    exchange: Exchange
    guard: CollectiveGuard
    tokens_R: list[int]
    payload: wire.Payload

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def others(self) -> int:
        return self.exchange.size - 1

    @property
    def own(self) -> slice:
        """Places of this rank's tokens among those of all ranks."""
        first = sum(self.tokens_R[: self.rank])
        return slice(first, first + self.tokens_R[self.rank])

    def to_all(self, rows_TW: Tensor) -> tuple[Tensor, Wait]:
        """Begin to send rows to every other rank; the received ones, and the wait."""
        to_R = [len(rows_TW)] * self.exchange.size
        return self.send(rows_TW.repeat(self.others, 1), to_R, self.tokens_R)

    def ids_of_all(self, own: OwnTokens, counts: LayerCounts) -> Tensor:
        """``(N, K)`` int64 ids of all ranks' tokens."""
        ids_TW = own.ids_TK.to(torch.int16).contiguous().view(torch.uint8)
        received, wait = self.to_all(ids_TW)
        self.wait(wait)
        counts.sent(0, ids_TW.numel() * self.others)
        return wire.read(self.with_own(received, ids_TW), torch.int16).long()

    def send(self, rows: Tensor, to_R: Sequence[int], from_R: Sequence[int]) -> tuple[Tensor, Wait]:
        return self.guard.all_to_all(self.exchange, rows, to_R, from_R)

    def wait(self, wait: Wait) -> None:
        with self.guard:
            wait()

    def with_own(self, received: Tensor, own: Tensor) -> Tensor:
        """Rows of all ranks' tokens in the order of ranks."""
        first = self.own.start
        return torch.cat([received[:first], own, received[first:]])


class _FixedRows:
    """Rows of one layer that go to all ranks."""

    def __init__(
        self,
        layer: int,
        own: OwnTokens,
        links: Links,
        copies: DeviceCopies,
        counts: LayerCounts,
    ) -> None:
        self.layer, self._own, self._links = layer, own, links
        self._copies, self._counts = copies, counts
        packed_TW = wire.pack(own.hidden_TH, own.weights_TK, links.payload)
        ids_TW = own.ids_TK.to(torch.int16).contiguous().view(torch.uint8)
        self._message = torch.cat([packed_TW, ids_TW], 1)
        counts.sent(packed_TW.numel() * links.others, ids_TW.numel() * links.others)
        self._received, self._wait = links.to_all(self._message)

    def arrive(self) -> tuple[Tensor, Routing]:
        """All ranks' rows, with a routing of the slots that this rank serves."""
        links, own = self._links, self._own
        links.wait(self._wait)
        rows_NW = links.with_own(self._received, self._message)
        slots, hidden = own.ids_TK.shape[1], own.hidden_TH
        ids_at = rows_NW.shape[1] - _ID_BYTES * slots
        packed_NW, ids_NW = rows_NW[:, :ids_at], rows_NW[:, ids_at:]
        ids_NK = wire.read(ids_NW, torch.int16).long()
        serving_NK, loads_E = self._copies.serving(ids_NK)
        other_NK = serving_NK != links.rank
        goes_TR = ranks_of(serving_NK[links.own], links.exchange.size)
        self._counts.found(loads_E, goes_TR, (~other_NK).sum())
        weights_NK = wire.unpack_weights(packed_NW, slots).masked_fill(other_NK, 0.0)
        routing = Routing(ids_NK.masked_fill(other_NK, UNUSED), weights_NK).ascending()
        rows_NH = wire.unpack(packed_NW, hidden.shape[1], hidden.dtype, links.payload)
        return rows_NH, routing

    def send_back(self, rows_NH: Tensor, failures: Failures) -> int:
        """Begin to return one row a token and rank; returns the bytes sent."""
        links, tokens = self._links, len(self._own.ids_TK)
        rows_NH = rows_NH.to(self._own.hidden_TH.dtype)
        wire.write_failures(rows_NH, links.rank, failures)
        self._mine_TH = rows_NH[links.own]
        sent = torch.cat([rows_NH[: links.own.start], rows_NH[links.own.stop :]])
        message = sent.view(torch.uint8)
        back_R = [tokens] * links.exchange.size
        self._back, self._wait = links.send(message, links.tokens_R, back_R)
        return message.numel()

    def total(self) -> tuple[Tensor, Tensor]:
        """``(T, H)`` sums in the order of ranks, and ``(T,)`` codes."""
        links, hidden = self._links, self._own.hidden_TH
        links.wait(self._wait)
        tokens, ranks = len(hidden), links.exchange.size
        back = self._back.view(hidden.dtype) if self._back.numel() else hidden[:0]
        place = tokens * links.rank
        rows_RTH = torch.cat([back[:place], self._mine_TH, back[place:]])
        rows_RTH = rows_RTH.view(ranks, tokens, hidden.shape[1])
        rank_R1 = torch.arange(ranks, device=hidden.device)[:, None]
        codes_T = wire.row_codes(rows_RTH, rank_R1).amax(0)
        return _wide(rows_RTH).sum(0).to(hidden.dtype), codes_T


class _ExactRows:
    """Rows of one layer, each of which goes to the ranks that serve it.

    Lists of rows are ordered by the rank they go to or come from, this rank last, then by token.
    """

    def __init__(
        self,
        layer: int,
        own: OwnTokens,
        links: Links,
        copies: DeviceCopies,
        counts: LayerCounts,
        exact: bool,
    ) -> None:
        self.layer, self._own, self._links, self._exact = layer, own, links, exact
        rank, ranks = links.rank, links.exchange.size
        self._ids_NK = links.ids_of_all(own, counts)
        self._serving_NK, loads_E = copies.serving(self._ids_NK)
        in_turn_R = torch.arange(ranks, device=own.hidden_TH.device)
        others, here = (in_turn_R[:rank], in_turn_R[rank + 1 :]), in_turn_R[rank : rank + 1]
        self._rank_R = torch.cat([*others, here])  # a list as an index would wait for the device
        goes_TR, here_NK = self._goes_TR, self._serving_NK == rank
        counts.found(loads_E, goes_TR, here_NK.sum())
        served_R = [part.any(1).sum() for part in here_NK.split(links.tokens_R)]
        slots_R = [part.sum() for part in here_NK.split(links.tokens_R)]
        returned_R = counted(self._serving_NK[links.own].flatten() + 1, ranks + 1)[1:]
        sizes = [goes_TR.sum(0), torch.stack(served_R), torch.stack(slots_R), returned_R]
        links.wait(links.exchange.settle)
        self._to_R, self._from_R, self._slots_R, self._returned_R = torch.stack(sizes).tolist()

        weights_TK = None if exact else own.weights_TK
        packed_TW = wire.pack(own.hidden_TH, weights_TK, links.payload)
        goes = _first(goes_TR[:, self._rank_R].T.flatten(), sum(self._to_R))
        leaving = goes % max(len(goes_TR), 1)
        rows_W = packed_TW[leaving]
        self._kept = rows_W[len(rows_W) - self._to_R[rank] :]
        message = rows_W[: len(rows_W) - self._to_R[rank]]
        counts.sent(message.numel())
        self._received, self._wait = links.send(message, self._to_R, self._from_R)

    @property
    def _goes_TR(self) -> Tensor:
        return ranks_of(self._serving_NK[self._links.own], self._links.exchange.size)

    def arrive(self) -> tuple[Tensor, Routing]:
        """The rows that this rank serves; in exact mode a row for each slot, with weight 1."""
        links, own = self._links, self._own
        links.wait(self._wait)
        here_NK = self._own_last(self._serving_NK == links.rank)
        served = _first(here_NK.any(1), sum(self._from_R))
        here_NK, ids_NK = here_NK[served], self._own_last(self._ids_NK)[served]
        packed = torch.cat([self._received, self._kept])
        hidden = own.hidden_TH
        rows_NH = wire.unpack(packed, hidden.shape[1], hidden.dtype, links.payload)
        if self._exact:
            slot_A = _first(here_NK.flatten(), sum(self._slots_R))
            experts_A1 = ids_NK.flatten()[slot_A][:, None]
            ones_A1 = torch.ones(experts_A1.shape, device=hidden.device)
            return rows_NH[slot_A // here_NK.shape[1]], Routing(experts_A1, ones_A1)
        weights_NK = wire.unpack_weights(packed, ids_NK.shape[1]).masked_fill(~here_NK, 0.0)
        return rows_NH, Routing(ids_NK.masked_fill(~here_NK, UNUSED), weights_NK).ascending()

    def send_back(self, rows: Tensor, failures: Failures) -> int:
        """Begin to return one row a token and rank, or one a slot; returns the bytes sent."""
        links = self._links
        to_R, from_R = (
            (self._slots_R, self._returned_R) if self._exact else (self._from_R, self._to_R)
        )
        rows = rows if self._exact else rows.to(self._own.hidden_TH.dtype)
        wire.write_failures(rows, links.rank, failures)
        sent = len(rows) - to_R[links.rank]
        self._mine, message = rows[sent:], rows[:sent].view(torch.uint8)
        self._back, self._wait = links.send(message, to_R, from_R)
        return message.numel()

    def total(self) -> tuple[Tensor, Tensor]:
        """``(T, H)`` sums in the order of slots or of ranks, and ``(T,)`` codes."""
        links, own, mine = self._links, self._own, self._mine
        links.wait(self._wait)
        back = self._back.view(mine.dtype) if self._back.numel() else mine[:0]
        serving_TK = self._serving_NK[links.own]
        if self._exact:
            rank_TX, weights_TX = serving_TK, own.weights_TK
            position_TX = self._slot_positions(serving_TK)
        else:
            goes_RT = self._goes_TR[:, self._rank_R].T
            place_RT = goes_RT.flatten().cumsum(0).view(goes_RT.shape) - 1
            position_TX = place_RT.masked_fill(~goes_RT, UNUSED).T
            rank_TX = self._rank_R.expand(position_TX.shape)
            weights_TX = torch.ones(position_TX.shape, device=back.device)
        total_TH = weighted_sum(
            _wide(back), position_TX, weights_TX, own.hidden_TH.dtype, _wide(mine)
        )
        failed = pad(wire.row_codes(torch.cat([back, mine]), 0), (1, 0))  # the first: no row
        found_TX = failed[position_TX + 1]
        found_TX = torch.where(found_TX > 0, found_TX + 2 * rank_TX, 0)
        return total_TH, found_TX.amax(1)

    def _slot_positions(self, serving_TK: Tensor) -> Tensor:
        """``(T, K)``: of each slot's result among those returned; -1 for unused ones."""
        rank, ranks = self._links.rank, self._links.exchange.size
        owner = serving_TK.masked_fill(serving_TK == rank, ranks)
        owner = owner.masked_fill(serving_TK < 0, ranks + 1).flatten()
        position = torch.empty_like(owner)
        position[owner.argsort(stable=True)] = torch.arange(len(owner), device=owner.device)
        return position.view_as(serving_TK).masked_fill(serving_TK < 0, UNUSED)

    def _own_last(self, values_NX: Tensor) -> Tensor:
        own = self._links.own
        return torch.cat([values_NX[: own.start], values_NX[own.stop :], values_NX[own]])


def ranks_of(serving_TK: Tensor, ranks: int) -> Tensor:
    """``(T, R)`` bool: whether a rank serves some of a token's slots."""
    goes = torch.zeros(len(serving_TK), ranks + 1, dtype=torch.bool, device=serving_TK.device)
    return goes.scatter_(1, serving_TK + 1, True)[:, 1:]


def _first(flags: Tensor, count: int) -> Tensor:
    """The places of the ``count`` flags that are set, ascending; unlike `Tensor.nonzero`, it does
    not wait for the device."""
    return (~flags).to(torch.uint8).argsort(stable=True)[:count]


def _wide(rows: Tensor) -> Tensor:
    """The rows in the dtype of the sum."""
    return rows if rows.dtype == torch.float64 else rows.float()


class _DeviceCounts:
    """Counters that stay on a device until they are asked for.

    Args:
        layers, experts: their shape.
        exchange: whose device it is.
    """

    def __init__(self, layers: int, experts: int, exchange: Exchange) -> None:
        self._rank, self._settle, self._changed = exchange.rank, exchange.settle, False
        # Behind the experts: pairs and served slots, as `DispatchStatistics` has them.
        self._counts = torch.zeros(layers, experts + 2, dtype=torch.int64, device=exchange.device)
        self._row_bytes = 0

    def of(self, layer: int, own: OwnTokens, statistics: DispatchStatistics) -> LayerCounts:
        """The counters of a layer that is dispatched now."""
        self._changed, rows = True, own.hidden_TH
        self._row_bytes = rows.shape[1] * rows.dtype.itemsize
        statistics.exchanges += 1
        statistics.tokens += len(rows)
        return LayerCounts(self._counts[layer], self._rank, statistics)

    def move_to(self, statistics: DispatchStatistics) -> None:
        """Add what has been counted since the last call."""
        if self._changed:
            self._settle()
            counts = self._counts.cpu().numpy().copy()  # in main memory it is the same array
            self._counts.zero_()
            self._changed = False
            pairs, served = counts[:, -2:].sum(0).tolist()
            statistics.add_counted(counts[:, :-2], pairs, served, self._row_bytes)


@dataclass(frozen=True)
class LayerCounts:
    """Counts one dispatch."""

    counts: Tensor
    rank: int
    statistics: DispatchStatistics

    def sent(self, row_bytes: int, meta_bytes: int = 0) -> None:
        self.statistics.bytes_out += row_bytes
        self.statistics.meta_bytes += meta_bytes

    def found(self, loads_E: Tensor, goes_TR: Tensor, served: Tensor) -> None:
        self.counts[: len(loads_E)] += loads_E
        self.counts[-2] += goes_TR.sum() - goes_TR[:, self.rank].sum()
        self.counts[-1] += served
