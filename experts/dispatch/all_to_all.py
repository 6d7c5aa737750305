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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.dispatch import rows as wire
from experts.dispatch.assignment import Assignment
from experts.dispatch.base import Combined, Dispatched, DispatchStatistics, Failures, fitting
from experts.dispatch.exchange import Exchange
from experts.dispatch.native import ArrivedAtOnce, AtOnce
from experts.dispatch.routing_exchange import Bytes, Rooms, agree
from experts.dispatch.rows import Together
from experts.placement import Placement
from kernels import weighted_sum
from routing import Routing

# ---- Rows between two halves of a dispatch and between two of a combine.

Wait = Callable[[], None]


@dataclass
class Sent:
    """Tokens on their way.

    Attributes:
        layer: MoE layer.
        part: of this rank.
        weights: of its tokens.
        hidden, dtype: of a row.
        rows: ``(tokens, W)`` bytes of each rank's tokens, where all have come.
        coming: else those of tokens that others bring here, its own, and the wait for the former.
    """

    layer: int
    part: Assignment
    weights: Tensor
    hidden: int
    dtype: torch.dtype
    rows: Sequence[Bytes] | None
    coming: tuple[Tensor, Tensor, Wait] | None


@dataclass
class Arrived(Dispatched):
    """Rows that this rank serves: those of other ranks in their order, then its own."""

    sent: Sent


@dataclass
class Returning:
    """Results on their way back.

    Attributes:
        come: ``(results, H)`` of other ranks for the tokens of this one, there after the wait.
        stay: ``(results, H)`` of its own.
        position: ``(T, ...)`` of each token's results in those and then these, negative for none.
        weights: of each of those results.
        dtype: of the sum.
    """

    come: Tensor
    stay: Tensor
    position: Tensor
    weights: Tensor
    dtype: torch.dtype
    wait: Wait


Arriving = Arrived | ArrivedAtOnce


# ----

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
        at_once: the way of compiled calls, where there is one.

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
        plain = self._exact and payload == "plain"
        self._rooms = Rooms(exchange.size, buffer_rows, exchange.near and plain)
        self._ones = torch.ones(0, 1)
        self.placements: list[Placement] = list(placements)
        self.statistics = DispatchStatistics([one.num_experts for one in placements])
        self._together = Together(self.statistics)
        shared = self._rooms, self._together, self.statistics
        self.at_once = AtOnce(exchange, *shared) if plain and exchange.line else None
        self.place(0, dict(enumerate(placements)))

    def place(self, epoch: int, placements: Mapping[int, Placement]) -> None:
        """New placements of some layers, between steps; every rank gets the same."""
        changed = {i: fitting(one, self._exchange.size) for i, one in placements.items()}
        self.placements = [changed.get(i, old) for i, old in enumerate(self.placements)]
        self.epoch = epoch
        if self.at_once is not None:
            self.at_once.place(epoch, self.placements)

    def dispatch(self, layer: int, hidden_states: Tensor, routing: Routing) -> Arriving:
        at_once, told_R = self.at_once, None
        if at_once is not None and at_once.ready(hidden_states, routing):
            found = at_once.dispatch(layer, hidden_states, routing)
            if isinstance(found, ArrivedAtOnce):
                return found
            told_R = found
        return self.receive(self.send(layer, hidden_states, routing, told_R))

    def combine(self, dispatched: Arriving, rows: Tensor, failures: Failures) -> Combined:
        if isinstance(dispatched, Arrived):
            return self.receive_back(self.send_back(dispatched, rows, failures))
        assert self.at_once is not None
        return self.at_once.combine(dispatched, rows, failures)

    def check(self) -> None:
        self._together.check()

    def send(
        self,
        layer: int,
        hidden_states: Tensor,
        routing: Routing,
        told_R: Sequence[Bytes] | None = None,
    ) -> Sent:
        """The first half of `dispatch`: tokens leave; some ranks may have told theirs already."""
        exchange, (tokens, hidden) = self._exchange, hidden_states.shape
        rows, weights = hidden_states.to(exchange.device), routing.weights.to(exchange.device)
        slots = 0 if self._exact else routing.top_k
        width = wire.width(hidden, rows.dtype, slots, self._payload)
        room_R = self._rooms.bytes_R(wire.room_for(hidden))
        along = self._packed(rows, weights) if tokens * width <= room_R[exchange.rank] else None
        at, ids = (layer, self.epoch), routing.expert_ids
        with self._together:
            agreed = agree(exchange, at, ids, rows.dtype, width, along, room_R, told_R)
        met = agreed.meeting
        self._rooms.saw(met)
        part = Assignment(agreed.tables, exchange.rank, self.placements[layer])
        if routing.top_k < met.slots:
            weights = pad(weights, (0, met.slots - routing.top_k))
        coming, sent_bytes = None, room_R[exchange.rank] * (exchange.size - 1)
        dtype = met.dtype or rows.dtype
        if agreed.rows is None:
            packed = self._packed(rows.to(dtype), weights)
            message = packed[torch.from_numpy(part.rows.leaving).to(exchange.device)]
            to_R, from_R = part.rows.send_R, part.rows.receive_R
            received, wait = self._together.start(exchange, message, to_R, from_R)
            coming, sent_bytes = (received, packed, wait), sent_bytes + message.numel()
        self.statistics.add(
            range(layer, layer + 1),
            part.loads_E[None],
            tokens=part.tokens,
            pairs=part.pairs,
            served=part.served,
            sent_bytes=sent_bytes,
            row_bytes=hidden * dtype.itemsize,
            meta_bytes=agreed.sent_bytes,
        )
        return Sent(layer, part, weights, hidden, dtype, agreed.rows, coming)

    def receive(self, sent: Sent) -> Arrived:
        """The second half of `dispatch`: what this rank serves."""
        part, device = sent.part, self._exchange.device
        tokens = part.slots.token_A if self._exact else part.rows.served_N
        if sent.rows is not None:
            taken = torch.from_numpy(np.concatenate(sent.rows)[tokens]).to(device)
        else:
            assert sent.coming is not None
            *both, wait = sent.coming
            with self._together:
                wait()
            taken = torch.cat(both)[torch.from_numpy(part.place_T[tokens]).to(device)]
        rows = wire.unpack(taken, sent.hidden, sent.dtype, self._payload)
        if self._exact:
            experts = torch.from_numpy(part.slots.experts_A).to(device)[:, None]
            if len(self._ones) < len(tokens):
                self._ones = torch.ones(len(tokens), 1, device=device)
            routing = Routing(experts, self._ones[: len(tokens)])
        else:
            experts = torch.from_numpy(part.rows.experts_NK).to(device)
            weights = wire.unpack_weights(taken, experts.shape[1])
            routing = Routing(experts, weights.masked_fill(experts < 0, 0.0)).ascending()
        return Arrived(sent.layer, rows, routing, True, sent)

    def send_back(self, dispatched: Arrived, rows: Tensor, failures: Failures) -> Returning:
        """The first half of `combine`: results leave."""
        sent, rank = dispatched.sent, self._exchange.rank
        part, dtype = sent.part, sent.dtype
        if self._exact:
            go_R, come_R = part.slots.served_R, part.slots.returned_R
            position, weights = part.slots.position_TK, sent.weights
        else:
            go_R, come_R = part.rows.receive_R, part.rows.send_R
            position, rows = part.rows.position_TR, rows.to(dtype)
            weights = torch.ones(position.shape, device=rows.device)
        wire.write_failures(rows, rank, failures)
        leaving = len(rows) - go_R[rank]
        message = rows[:leaving].view(torch.uint8)
        received, wait = self._together.start(self._exchange, message, go_R, come_R)
        self.statistics.bytes_back += message.numel()
        come, stay = received.view(rows.dtype), rows[leaving:]
        return Returning(come, stay, torch.from_numpy(position), weights, dtype, wait)

    def receive_back(self, returning: Returning) -> Combined:
        """The second half of `combine`: rows of the tokens that this rank brought."""
        with self._together:
            returning.wait()
        come, stay = returning.come, returning.stay
        position = returning.position.to(come.device)
        if come.dtype not in (torch.float32, torch.float64):
            come, stay = come.float(), stay.float()
        total = weighted_sum(come, position, returning.weights, returning.dtype, stay)
        nan = math.isnan(total[:, 0].sum())  # as rows begin that say why they are none
        return wire.combined(total, nan, position, returning.come, returning.stay)

    def _packed(self, hidden_states: Tensor, weights: Tensor) -> Tensor:
        return wire.pack(hidden_states, None if self._exact else weights, self._payload)
