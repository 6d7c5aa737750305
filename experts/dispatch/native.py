"""A dispatch and a combine in one compiled call each, or within one for all layers of a step, while
ranks of one machine bring what they brought to the layers before, as in decode steps.

What is sent is what `all_to_all` sends, so each rank goes this way or that one as it can. Who hears
that another brings something else goes on there with what was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.base import Combined, Dispatched, DispatchStatistics, Failures
from experts.dispatch.exchange import Exchange
from experts.dispatch.routing_exchange import IDS, Bytes, Meeting, Rooms
from experts.dispatch.rows import Together, combined, room_for, write_failures
from experts.placement import Placement
from kernels.cpu import choose_kernel
from kernels.cpu.all_to_all import BAD_ID, LOST, OTHERWISE, Assigned, bad_id
from routing import Routing

_DTYPES = torch.float32, torch.bfloat16
"""Of hidden states whose results `kernels/cpu/meeting.cpp` sums."""


@dataclass
class ArrivedAtOnce(Dispatched):
    """Rows that this rank serves, until the next layer.

    Attributes:
        part: who serves what.
        weights: ``(T, K)`` of its own tokens.
    """

    part: Assigned
    weights: Tensor


class AtOnce:
    """Dispatches and combines over an exchange with a line, a combine after each dispatch.

    Args:
        rooms: knows what ranks have brought.
        together: hears of the time that calls take, and of lost ranks.
    """

    def __init__(
        self, exchange: Exchange, rooms: Rooms, together: Together, statistics: DispatchStatistics
    ) -> None:
        assert exchange.line is not None
        self._line, self._rank, self._others = exchange.line, exchange.rank, exchange.size - 1
        self._rooms, self._together, self._statistics = rooms, together, statistics
        self._met: Meeting | None = None

    def place(self, epoch: int, placements: Sequence[Placement]) -> None:
        """The placements in force from the next step on."""
        self._epoch, self._placements, self._met = epoch, placements, None

    def ready(self, hidden: Tensor, routing: Routing) -> bool:
        """Whether all ranks have brought the same before, with rows, and this one does again."""
        return self._goes_on(hidden.shape, hidden.dtype, routing.expert_ids.shape)

    def walk(self, tokens: int, hidden: int, slots: int) -> int | None:
        """The address of a meeting (kernels/cpu/meeting.h) for compiled code that brings float32
        rows to one layer after the other by itself, by way of `run`; None where it cannot.

        Where it has to leave a layer to its caller, that goes to `dispatch` and `combine`, which do
        not exchange again what has been exchanged.
        """
        if not self._goes_on((tokens, hidden), torch.float32, (tokens, slots)):
            return None
        self._meeting.record.seconds = 0.0
        return self._meeting.address

    def run(self, act: Callable[[], int]) -> int:
        """Calls what meets the other ranks."""
        self._together.check()
        return self._line.run(act)

    def walked(self, layers: int) -> list[list[int]]:
        """So many layers, from the first on, have been met by a walk: the experts of each of them
        that this rank has served, ascending."""
        self._count(range(layers))
        self._statistics.seconds += self._meeting.record.seconds
        return self._meeting.experts(range(layers))

    def dispatch(self, layer: int, hidden: Tensor, routing: Routing) -> ArrivedAtOnce | list[Bytes]:
        """What this rank serves; or what the ranks told, where some are not where they were.

        Raises:
            ExchangeError: a rank is lost.
            IndexError: an id that is no expert.
        """
        meeting = self._meeting
        ids, rows = routing.expert_ids.contiguous(), hidden.contiguous()
        with self._together:
            done = self._line.run(lambda: meeting.dispatch(layer, ids, rows))
            self._check(done)
        if done == BAD_ID:
            raise bad_id(self._placements[layer].num_experts)
        if done == OTHERWISE:
            return meeting.messages
        part = meeting.assigned(layer)
        self._count(range(layer, layer + 1))
        served = len(part.token_A)
        own = Routing(torch.from_numpy(part.experts_A)[:, None], meeting.ones[:served])
        rows = meeting.served[:served].view(hidden.dtype)
        return ArrivedAtOnce(layer, rows, own, True, part, routing.weights)

    def combine(self, arrived: ArrivedAtOnce, rows: Tensor, failures: Failures) -> Combined:
        """Rows of the tokens that this rank brought.

        Raises:
            ExchangeError: a rank is lost.
        """
        meeting, part, rank = self._meeting, arrived.part, self._rank
        write_failures(rows, rank, failures)
        dtype, weights = arrived.hidden_states.dtype, arrived.weights.contiguous()
        total = torch.empty(len(weights), rows.shape[1], dtype=dtype)
        with self._together:
            done = self._line.run(lambda: meeting.combine(rows, weights, total))
            self._check(done)
        if done != OTHERWISE:
            return Combined(total)
        leave = len(rows) - part.served_R[rank]
        come = meeting.returned[: sum(part.returned_R) - part.returned_R[rank]]
        return combined(total, True, torch.from_numpy(part.position_TK), come, rows[leave:])

    def _check(self, done: int) -> None:
        if done == LOST:
            record = self._meeting.record
            raise self._line.lost(record.lost, record.error)

    def _count(self, layers: range) -> None:
        meeting, counted = self._meeting, self._meeting.counted(layers)
        room = len(meeting.messages[self._rank]) - IDS.stop
        self._statistics.add(
            layers,
            counted.loads_LE,
            tokens=meeting.own_tokens * len(layers),
            pairs=counted.pairs,
            served=counted.served,
            sent_bytes=room * self._others * len(layers),
            row_bytes=meeting.width,
            meta_bytes=IDS.stop * self._others * len(layers),
        )
        result_bytes = meeting.returned.shape[1] * meeting.returned.element_size()
        self._statistics.bytes_back += counted.sent_back * result_bytes

    def _goes_on(self, hidden: tuple[int, ...], dtype: torch.dtype, ids: tuple[int, ...]) -> bool:
        met = self._rooms.steady
        if met is None or not met.width or dtype not in _DTYPES:
            return False
        own = met.heads[self._rank]
        if (
            dtype != met.dtype
            or hidden != (own.tokens, own.width // dtype.itemsize)
            or ids != (own.tokens, own.slots)
        ):
            return False
        if met is not self._met:
            self._make(met, self._rooms.bytes_R(room_for(hidden[1])), hidden[1])
        return True

    def _make(self, met: Meeting, room_R: Sequence[int], hidden: int) -> None:
        native, _ = choose_kernel()
        assert native is not None, "there is no line without"
        self._met = met
        self._meeting = native.meeting(
            self._line.files,
            self._rank,
            self._line.timeout_s,
            met.told,
            [(head.tokens, head.slots) for head in met.heads],
            met.width,
            IDS.stop,
            [IDS.stop + room for room in room_R],
            hidden,
            self._epoch,
            [(placement.holders, placement.num_experts) for placement in self._placements],
        )
