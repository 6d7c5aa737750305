"""A dispatch and a combine in one compiled call each, as long as ranks of one machine bring what
they brought to the layers before: decode steps do.

What is sent is what `all_to_all` sends, so each rank goes this way or that one as it can. Who hears
that another brings something else goes on there with what was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.agreement import IDS, Bytes, Meeting
from experts.dispatch.base import Combined, Dispatched, Failures
from experts.dispatch.exchange import Exchange
from experts.dispatch.rooms import Rooms
from experts.dispatch.rows import combined, room_for, write_failures
from experts.dispatch.statistics import DispatchStatistics
from experts.placement import Placement
from kernels.cpu import choose_kernel
from kernels.cpu.assign import Assigned, bad_id
from kernels.cpu.meeting import BAD_ID, LOST, OTHERWISE
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
    """Dispatches and combines over an exchange with a line, a combine after each dispatch."""

    def __init__(self, exchange: Exchange, statistics: DispatchStatistics) -> None:
        assert exchange.line is not None
        self._line, self._rank, self._others = exchange.line, exchange.rank, exchange.size - 1
        self._statistics = statistics
        self._met: Meeting | None = None

    def ready(self, rooms: Rooms, hidden: Tensor, routing: Routing) -> bool:
        """Whether all ranks have brought the same before, with rows, and this one does again."""
        met = rooms.steady
        if met is None or not met.width or hidden.dtype not in _DTYPES:
            return False
        own = met.heads[self._rank]
        if (
            hidden.dtype != met.dtype
            or hidden.shape != (own.tokens, own.width // hidden.element_size())
            or routing.expert_ids.shape != (own.tokens, own.slots)
        ):
            return False
        if met is not self._met:
            self._make(met, rooms.bytes_R(room_for(hidden.shape[1])), hidden.shape[1])
        return True

    def dispatch(
        self, at: tuple[int, int], placement: Placement, hidden: Tensor, routing: Routing
    ) -> ArrivedAtOnce | list[Bytes]:
        """What this rank serves; or what the ranks told, where some are not where they were.

        Raises:
            ExchangeError: a rank is lost.
            IndexError: an id that is no expert.
        """
        meeting, experts = self._meeting, placement.num_experts
        ids, rows = routing.expert_ids.contiguous(), hidden.contiguous()
        done = self._line.run(lambda: meeting.dispatch(at, ids, rows, placement.holders, experts))
        if done == LOST:
            raise self._line.lost(meeting.record.lost, meeting.record.error)
        if done == BAD_ID:
            raise bad_id(experts)
        if done == OTHERWISE:
            return meeting.messages
        part = meeting.assigned()
        served = len(part.token_A)
        self._statistics.add(
            *(at[0], part.loads_E, len(ids), part.pairs, served),
            (len(meeting.messages[self._rank]) - IDS.stop) * self._others,
            meeting.width,
            IDS.stop * self._others,
        )
        own = Routing(torch.from_numpy(part.experts_A)[:, None], self._ones[:served])
        rows = meeting.served[:served].view(hidden.dtype)
        return ArrivedAtOnce(at[0], rows, own, True, part, routing.weights)

    def combine(self, arrived: ArrivedAtOnce, rows: Tensor, failures: Failures) -> Combined:
        """Rows of the tokens that this rank brought.

        Raises:
            ExchangeError: a rank is lost.
        """
        meeting, part, rank = self._meeting, arrived.part, self._rank
        write_failures(rows, rank, failures)
        dtype, weights = arrived.hidden_states.dtype, arrived.weights.contiguous()
        total = torch.empty(len(weights), rows.shape[1], dtype=dtype)
        done = self._line.run(lambda: meeting.combine(rows, weights, total))
        if done == LOST:
            raise self._line.lost(meeting.record.lost, meeting.record.error)
        leave = len(rows) - part.served_R[rank]
        self._statistics.bytes_back += leave * rows.shape[1] * rows.element_size()
        if done != OTHERWISE:
            return Combined(total)
        come = meeting.returned[: sum(part.returned_R) - part.returned_R[rank]]
        return combined(total, True, torch.from_numpy(part.position_TK), come, rows[leave:])

    def _make(self, met: Meeting, room_R: Sequence[int], hidden: int) -> None:
        native, _ = choose_kernel()
        assert native is not None, "there is no line without"
        self._met, self._meeting = (
            met,
            native.meeting(
                self._line.files,
                self._rank,
                self._line.timeout_s,
                met.told,
                [(head.tokens, head.slots) for head in met.heads],
                met.width,
                IDS.stop,
                [IDS.stop + room for room in room_R],
                hidden,
            ),
        )
        self._ones = torch.ones(len(self._meeting.served), 1)
