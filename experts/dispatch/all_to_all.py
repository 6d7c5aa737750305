"""Tokens go to the ranks that serve their experts, and results come back.

All ranks hear which experts everybody's tokens want (`agreement`), work out who serves what
(`assignment`), and exchange rows twice, or once where rows go along with the ids (`rooms`).
Dropless, whatever the routing.

`exact` brings back one row for each slot, before its weight, and the token's own rank sums them in
slot order as kernels do where all experts are at hand: the bits do not depend on how many ranks
there are, on placements or copies, or on who comes first. `summed` brings back one row for each
rank that served the token, which is the least there is to send, and equal up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from experts.dispatch import rows as wire
from experts.dispatch.agreement import agree
from experts.dispatch.assignment import Assignment, Ints, fitting
from experts.dispatch.base import Combined, Failure, Failures
from experts.dispatch.exchange import Exchange
from experts.dispatch.rooms import Rooms
from experts.dispatch.statistics import DispatchStatistics
from experts.dispatch.travelling import Arrived, Returning, Sent, Together, Wait, no_wait
from experts.placement import Placement
from kernels import weighted_sum
from routing import Routing

Sum = Literal["exact", "summed"]


class AllToAllDispatcher:
    """A `Dispatcher` over several ranks.

    Args:
        exchange: connects them.
        placements: of each MoE layer: which ranks are asked for which experts. No result depends on
            them, as every rank can serve every expert, near or not.
        combine: `exact` or `summed`; see above.
        payload: of hidden states: `plain`, or `int8` with a scale for each token.
        buffer_rows: room for so many tokens' rows in the first message, to all ranks alike: static
            buffers, and one exchange less where they suffice; more tokens travel as always, all of
            them with 0. None: see `rooms`.

    Attributes:
        placements: in force now.
        epoch: of the placements; ranks compare it whenever they meet.

    Raises:
        ValueError: placements for another number of ranks, or too many experts.
    """

    local = False

    def __init__(
        self,
        exchange: Exchange,
        placements: Sequence[Placement],
        *,
        combine: Sum = "exact",
        payload: wire.Payload = "plain",
        buffer_rows: int | None = None,
    ) -> None:
        self._exchange, self._exact, self._payload = exchange, combine == "exact", payload
        self._rooms, self._ones = Rooms(exchange.size, buffer_rows), torch.ones(0, 1)
        self.placements = [fitting(placement, exchange.size) for placement in placements]
        self.epoch = 0
        self.statistics = DispatchStatistics(len(placements))
        self._together = Together(self.statistics)

    def place(self, epoch: int, placements: Mapping[int, Placement]) -> None:
        """New placements of some layers, between steps; every rank gets the same."""
        changed = {i: fitting(one, self._exchange.size) for i, one in placements.items()}
        self.placements = [changed.get(i, old) for i, old in enumerate(self.placements)]
        self.epoch = epoch

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Arrived:
        return self.receive(self.send(layer, hidden_states, routing))

    def combine(self, dispatched: Arrived, rows: Tensor, failures: Failures) -> Combined:
        return self.receive_back(self.send_back(dispatched, rows, failures))

    def check(self) -> None:
        self._together.check()

    def send(self, layer: int, hidden_states: Tensor, routing: Routing) -> Sent:
        """The first half of `dispatch`: tokens leave."""
        exchange, hidden = self._exchange, hidden_states.shape[1]
        hidden_states = hidden_states.to(exchange.device)
        routing = Routing(routing.expert_ids, routing.weights.to(exchange.device))
        slots = 0 if self._exact else routing.top_k
        width = wire.width(hidden, hidden_states.dtype, slots, self._payload)
        room_R = self._rooms.bytes_R(wire.room_for(hidden))
        fits = len(hidden_states) * width <= room_R[exchange.rank]
        along = self._packed(hidden_states, routing.weights) if fits else None
        at, ids, dtype = (layer, self.epoch), routing.expert_ids, hidden_states.dtype
        with self._together:
            agreed = agree(exchange, at, ids, dtype, width, along, room_R)
        self._rooms.saw(agreed.heads)
        part = Assignment(agreed.experts_TK, agreed.tokens_R, exchange.rank, self.placements[layer])
        hidden_states = hidden_states.to(agreed.dtype)
        routing = routing.pad(agreed.experts_TK.shape[1])
        wait, sent_bytes = no_wait, room_R[exchange.rank] * (exchange.size - 1)
        place_T = None
        if agreed.rows is not None:
            received = torch.from_numpy(agreed.rows).to(exchange.device)
        else:
            _, place_T = part.arriving
            leaving = torch.from_numpy(part.rows.leaving).to(exchange.device)
            message = self._packed(hidden_states[leaving], routing.weights[leaving])
            wait, received = self._start(message, part.rows.send_R, part.rows.receive_R)
            sent_bytes += message.numel()
        row_bytes = hidden * hidden_states.element_size()
        self.statistics.add(layer, part, sent_bytes, row_bytes, agreed.sent_bytes)
        return Sent(layer, part, routing, hidden_states, received, place_T, wait)

    def receive(self, sent: Sent) -> Arrived:
        """The second half of `dispatch`: what this rank serves."""
        with self._together:
            sent.wait()
        part, own, device = sent.part, sent.hidden_states, sent.hidden_states.device
        rows, weights = wire.unpack(sent.received, own.shape[1], own.dtype, self._payload)
        if sent.place_T is not None:  # also the rows that stay: where they are served is no matter
            own = wire.rounded(own) if self._payload == "int8" else own
            rows, weights = torch.cat([rows, own]), torch.cat([weights, sent.own_weights(weights)])

        def place(tokens: Ints) -> Tensor:
            places = tokens if sent.place_T is None else sent.place_T[tokens]
            return torch.from_numpy(places).to(device)

        if self._exact:
            slots = part.slots
            experts = torch.from_numpy(slots.experts_A)[:, None].to(device)
            if len(self._ones) < len(experts):
                self._ones = torch.ones(len(experts), 1, device=device)
            routing = Routing(experts, self._ones[: len(experts)])
            served = rows.index_select(0, place(slots.token_A))
            return Arrived(sent.layer, served, routing, True, sent)
        chosen = place(part.rows.served_N)
        experts = torch.from_numpy(part.rows.experts_NK).to(device)
        routing = Routing(experts, weights[chosen].masked_fill(experts < 0, 0.0)).ascending()
        return Arrived(sent.layer, rows[chosen], routing, True, sent)

    def send_back(self, dispatched: Arrived, rows: Tensor, failures: Failures) -> Returning:
        """The first half of `combine`: results leave."""
        sent, rank = dispatched.sent, self._exchange.rank
        part, dtype = sent.part, sent.hidden_states.dtype
        if self._exact:
            go_R, come_R = part.slots.served_R, part.slots.returned_R
            position, weights = part.slots.position_TK, sent.routing.weights
        else:
            go_R, come_R = part.rows.receive_R, part.rows.send_R
            position, rows = part.rows.position_TR, rows.to(dtype)
            weights = torch.ones(position.shape, device=rows.device)
        for index, failure in failures.items():
            told = failure._replace(reason=f"rank {rank}: {failure.reason}")
            wire.write_failure(rows, index, told)
        leaving, staying = rows.split([len(rows) - go_R[rank], go_R[rank]])
        message = leaving.view(torch.uint8)
        wait, received = self._start(message, go_R, come_R, len(staying))
        returned = received.view(rows.dtype)
        returned[len(returned) - len(staying) :] = staying
        self.statistics.bytes_back += message.numel()
        return Returning(returned, torch.from_numpy(position), weights, dtype, wait)

    def receive_back(self, returning: Returning) -> Combined:
        """The second half of `combine`: rows of the tokens that this rank brought."""
        with self._together:
            returning.wait()
        rows, position = returning.rows, returning.position.to(returning.rows.device)
        failures: dict[int, Failure] = {}
        for index, failure in wire.read_failures(rows).items():
            for token in (position == index).any(1).nonzero()[:, 0].tolist():
                failures.setdefault(token, failure)
        summable = rows if rows.dtype == torch.float64 else rows.float()
        total = weighted_sum(summable, position, returning.weights, returning.dtype)
        if failures:
            total[list(failures)] = 0
        return Combined(total, failures)

    def _packed(self, hidden_states: Tensor, weights: Tensor) -> Tensor:
        return wire.pack(hidden_states, None if self._exact else weights, self._payload)

    def _start(
        self, message: Tensor, send_R: Sequence[int], receive_R: Sequence[int], spare: int = 0
    ) -> tuple[Wait, Tensor]:
        """Begin to send bytes of rows to the others; room for theirs, and for `spare` rows."""
        rank, others = self._exchange.rank, [list(send_R), list(receive_R)]
        others[0][rank] = others[1][rank] = 0
        coming = sum(others[1])
        received = message.new_empty(coming + spare, message.shape[1])
        with self._together:
            wait = self._exchange.start(message, received[:coming], *others)
        return wait, received
