"""The way of a token to the ranks that serve its experts, and back: `AllToAllDispatcher`.

`dispatch`: the ranks exchange expert ids (`routing_exchange`), each computes the same assignment of
slots to ranks (`assignment`), and rows of hidden states go to the ranks that serve them, in an
all-to-all of their own or inline with the ids. The experts run on what has arrived. `combine`: the
results go back by another all-to-all, and the token's rank sums them. No token is dropped, whatever
the routing. In decode steps on one machine, compiled code does the same (`native`).

In "exact" mode a result travels for each slot, before its weight, and the token's rank sums them in
slot order, as kernels do on a single rank: the bits do not depend on the number of ranks, on
placements or copies, or on which message comes first. In "summed" mode one row travels for each
rank that served the token, which is the least traffic, and the order of sums differs.

Legend: T tokens of this rank, K slots (top-k), H hidden, W bytes of a row, R ranks, N rows that
this rank serves, A slots that it serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.dispatch import rows as wire
from experts.dispatch.assignment import Assignment
from experts.dispatch.base import (
    Combined,
    CombineMode,
    Dispatched,
    Failures,
    RankDispatcher,
    nothing,
)
from experts.dispatch.exchange import Bytes, Exchange
from experts.dispatch.native import NativeDispatch, NativeDispatched
from experts.dispatch.routing_exchange import InlineRows, exchange_routing
from experts.placement import Placement
from kernels import weighted_sum
from routing import Routing

Wait = Callable[[], None]


class AllToAllDispatcher(RankDispatcher["ReceivedRows"]):
    """The `RankDispatcher` of rows in main memory.

    Args:
        exchange, placements: see `RankDispatcher`.
        combine: "exact" or "summed"; see above.
        payload: of hidden states: "plain", or "int8" with a scale for each token.
        buffer_rows: space for the rows of this many tokens of each rank, inline with the ids:
            buffers of a fixed size, and one exchange less while they suffice. More tokens take the
            exchange of their own; so do all with 0. None: as `InlineRows` decides.

    Attributes:
        native: does the same by compiled code in decode steps; None where it cannot.
    """

    name = "all_to_all"

    def __init__(
        self,
        exchange: Exchange,
        placements: Sequence[Placement],
        *,
        combine: CombineMode = "exact",
        payload: wire.Payload = "plain",
        buffer_rows: int | None = None,
    ) -> None:
        super().__init__(exchange, placements)
        self._exact, self._payload = combine == "exact", payload
        exact = self._exact and payload == "plain"
        self._inline = InlineRows(exchange.size, buffer_rows, exchange.same_machine and exact)
        self._ones = torch.ones(0, 1)
        self.native: NativeDispatch | None = None
        if exact and exchange.sockets:
            shared = self._inline, self._guard, self.statistics
            self.native = NativeDispatch(exchange, *shared, self.epoch, self.placements)

    def apply_placements(self, epoch: int, placements: Mapping[int, Placement]) -> None:
        super().apply_placements(epoch, placements)
        if self.native is not None:
            self.native.apply_placements(epoch, self.placements)

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> ReceivedRows:
        native, messages_R = self.native, None
        if native is not None and native.ready(hidden_states, routing):
            found = native.dispatch(layer, hidden_states, routing)
            if isinstance(found, NativeDispatched):
                return found
            messages_R = found
        return self.finish_dispatch(self.start_dispatch(layer, hidden_states, routing, messages_R))

    def combine(
        self,
        dispatched: ReceivedRows,
        rows: Tensor,
        failures: Failures,
        meanwhile: Callable[[], None] = nothing,
    ) -> Combined:
        if isinstance(dispatched, NativeDispatched):
            assert self.native is not None
            return self.native.combine(dispatched, rows, failures)
        return super().combine(dispatched, rows, failures, meanwhile)

    def start_dispatch(
        self,
        layer: int,
        hidden_states: Tensor,
        routing: Routing,
        messages_R: Sequence[Bytes] | None = None,
    ) -> DispatchInFlight:
        """Exchange ids, assign slots to ranks, begin to send the rows.

        Args:
            messages_R: of all ranks, if they have been exchanged already.
        """
        exchange, (tokens, hidden) = self._exchange, hidden_states.shape
        rows, weights = hidden_states, routing.weights
        slots = 0 if self._exact else routing.top_k
        width = wire.width(hidden, rows.dtype, slots, self._payload)
        space_R = self._inline.bytes_R(wire.widest(hidden))
        inline = self._packed(rows, weights) if tokens * width <= space_R[exchange.rank] else None
        place, ids = (layer, self.epoch), routing.expert_ids
        with self._guard:
            everyone = exchange_routing(
                exchange, place, ids, rows.dtype, width, inline, space_R, messages_R
            )
        headers = everyone.headers
        self._inline.observe(headers)
        assignment = Assignment(everyone.tables, exchange.rank, self.placements[layer])
        if routing.top_k < headers.slots:
            weights = pad(weights, (0, headers.slots - routing.top_k))
        incoming, sent_bytes = None, space_R[exchange.rank] * (exchange.size - 1)
        dtype = headers.dtype or rows.dtype
        if everyone.rows is None:
            packed, per_rank = self._packed(rows.to(dtype), weights), assignment.per_rank
            message = packed[torch.from_numpy(per_rank.leaving)]
            to_R, from_R = per_rank.send_R, per_rank.receive_R
            received, wait = self._guard.all_to_all(exchange, message, to_R, from_R)
            incoming, sent_bytes = (received, packed, wait), sent_bytes + message.numel()
        self.statistics.add(
            range(layer, layer + 1),
            assignment.loads_E[None],
            tokens=assignment.tokens,
            pairs=assignment.pairs,
            served=assignment.served,
            sent_bytes=sent_bytes,
            row_bytes=hidden * dtype.itemsize,
            meta_bytes=everyone.sent_bytes,
        )
        return DispatchInFlight(layer, assignment, weights, hidden, dtype, everyone.rows, incoming)

    def finish_dispatch(self, flight: DispatchInFlight) -> AllToAllDispatched:
        assignment = flight.assignment
        per_slot = assignment.per_slot
        tokens = per_slot.token_A if self._exact else assignment.per_rank.served_N
        if flight.inline_rows is not None:
            taken = torch.from_numpy(np.concatenate(flight.inline_rows)[tokens])
        else:
            assert flight.incoming is not None
            received, own, wait = flight.incoming
            with self._guard:
                wait()
            places = torch.from_numpy(assignment.place_T[tokens])
            taken = torch.cat([received, own])[places]
        rows = wire.unpack(taken, flight.hidden, flight.dtype, self._payload)
        if self._exact:
            experts = torch.from_numpy(per_slot.experts_A)[:, None]
            if len(self._ones) < len(tokens):
                self._ones = torch.ones(len(tokens), 1)
            routing = Routing(experts, self._ones[: len(tokens)])
        else:
            experts = torch.from_numpy(assignment.per_rank.experts_NK)
            weights = wire.unpack_weights(taken, experts.shape[1])
            routing = Routing(experts, weights.masked_fill(experts < 0, 0.0)).ascending()
        return AllToAllDispatched(flight.layer, rows, routing, True, flight)

    def start_combine(
        self, dispatched: ReceivedRows, rows: Tensor, failures: Failures
    ) -> CombineInFlight:
        assert isinstance(dispatched, AllToAllDispatched)
        flight, rank = dispatched.flight, self._exchange.rank
        assignment, dtype = flight.assignment, flight.dtype
        if self._exact:
            per_slot, weights = assignment.per_slot, flight.weights
            to_R, from_R = per_slot.served_R, per_slot.returned_R
            position = per_slot.position_TK
        else:
            per_rank, rows = assignment.per_rank, rows.to(dtype)
            to_R, from_R = per_rank.receive_R, per_rank.send_R
            position = per_rank.position_TR
            weights = torch.ones(position.shape)
        wire.write_failures(rows, rank, failures)
        sent = len(rows) - to_R[rank]
        message = rows[:sent].view(torch.uint8)
        received, wait = self._guard.all_to_all(self._exchange, message, to_R, from_R)
        self.statistics.bytes_back += message.numel()
        results, own = received.view(rows.dtype), rows[sent:]
        return CombineInFlight(results, own, torch.from_numpy(position), weights, dtype, wait)

    def finish_combine(self, flight: CombineInFlight) -> Combined:
        with self._guard:
            flight.wait()
        received, own, position = flight.received, flight.own, flight.position
        if received.dtype not in (torch.float32, torch.float64):
            received, own = received.float(), own.float()
        total = weighted_sum(received, position, flight.weights, flight.dtype, own)
        nan = math.isnan(total[:, 0].sum())  # a failed row begins with a NaN
        return wire.combined(total, nan, position, flight.received, flight.own)

    def _packed(self, hidden_states: Tensor, weights: Tensor) -> Tensor:
        return wire.pack(hidden_states, None if self._exact else weights, self._payload)


@dataclass
class DispatchInFlight:
    """A dispatch between its halves.

    Attributes:
        layer: MoE layer.
        assignment: which rank serves what.
        weights: ``(T, K)`` of this rank's tokens.
        hidden, dtype: of a row.
        inline_rows: ``(tokens, W)`` bytes of each rank's tokens; None if they do not all come with
            the ids.
        incoming: then the rows received from other ranks, this rank's own rows, and the wait that
            fills the former.
    """

    layer: int
    assignment: Assignment
    weights: Tensor
    hidden: int
    dtype: torch.dtype
    inline_rows: Sequence[Bytes] | None
    incoming: tuple[Tensor, Tensor, Wait] | None


@dataclass
class AllToAllDispatched(Dispatched):
    """Rows that this rank serves: those of other ranks in rank order, then its own."""

    flight: DispatchInFlight


@dataclass
class CombineInFlight:
    """A combine between its halves.

    Attributes:
        received: ``(results, H)`` from other ranks for tokens of this one, filled by the wait.
        own: ``(results, H)`` that this rank computed for its own tokens.
        position: ``(T, K or R)`` of each token's results in `received` with `own` behind it;
            negative for none.
        weights: of each of those results.
        dtype: of the sum.
        wait: for `received`.
    """

    received: Tensor
    own: Tensor
    position: Tensor
    weights: Tensor
    dtype: torch.dtype
    wait: Wait


ReceivedRows = AllToAllDispatched | NativeDispatched
