"""Dispatch and combine by compiled code, for decode steps of ranks on one machine.

While all ranks bring the same shapes as at the layers before, `NativeDispatch` runs a dispatch or a
combine in one call, and compiled steps run those of all layers in one call
(`kernels/cpu/all_to_all.h`). The messages are those of `experts.dispatch.all_to_all`, so each rank
chooses for itself. If another rank's header differs, this rank falls back to `all_to_all`, reusing
the messages already received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch.base import (
    CollectiveGuard,
    Combined,
    Dispatched,
    DispatchStatistics,
    Failures,
)
from experts.dispatch.exchange import Bytes, Exchange
from experts.dispatch.routing_exchange import ID_BYTES, InlineRows, RankHeaders
from experts.dispatch.rows import combined, widest, write_failures
from experts.placement import Placement
from kernels.cpu import choose_kernel
from kernels.cpu.all_to_all import BAD_ID, LOST, OTHERWISE, Assigned, bad_id
from routing import Routing

_DTYPES = torch.float32, torch.bfloat16
"""Dtypes of hidden states whose results `kernels/cpu/all_to_all.cpp` sums."""


@dataclass
class NativeDispatched(Dispatched):
    """Rows that this rank serves; overwritten by the next dispatch.

    Attributes:
        assigned: which rank serves what.
        weights: ``(T, K)`` of this rank's own tokens.
    """

    assigned: Assigned
    weights: Tensor


class NativeDispatch:
    """Dispatches and combines over the sockets of an exchange, a combine after each dispatch.

    Args:
        exchange: with sockets.
        inline: knows what ranks brought to the last layers.
        guard: times the calls, and keeps the error of a lost rank.
        statistics: counts what was moved.
        epoch: of the placements.
        placements: of each MoE layer.
    """

    def __init__(
        self,
        exchange: Exchange,
        inline: InlineRows,
        guard: CollectiveGuard,
        statistics: DispatchStatistics,
        epoch: int,
        placements: Sequence[Placement],
    ) -> None:
        assert exchange.sockets is not None
        self._sockets, self._rank, self._others = exchange.sockets, exchange.rank, exchange.size - 1
        self._inline, self._guard, self._statistics = inline, guard, statistics
        self.apply_placements(epoch, placements)

    def apply_placements(self, epoch: int, placements: Sequence[Placement]) -> None:
        """Use these placements from the next step on."""
        self._epoch, self._placements = epoch, placements
        self._headers: RankHeaders | None = None

    def ready(self, hidden: Tensor, routing: Routing) -> bool:
        """Return whether all ranks brought inline rows before, and this one brings the same
        shapes."""
        return self._prepare(hidden.shape, hidden.dtype, routing.expert_ids.shape)

    def step_address(self, tokens: int, hidden: int, slots: int) -> int | None:
        """The address of the state with which compiled code dispatches float32 rows at one layer
        after the other; None where it cannot. Call it within `run`, and `finish_step` after it.

        A layer that compiled code leaves to its caller goes through `dispatch` and `combine`, which
        do not repeat an exchange that is done.
        """
        if not self._prepare((tokens, hidden), torch.float32, (tokens, slots)):
            return None
        self._native.record.seconds = 0.0
        return self._native.address

    def run(self, act: Callable[[], int]) -> int:
        """Call what uses the address.

        Raises:
            ExchangeError: an earlier collective failed.
        """
        self._guard.check()
        return self._sockets.run(act)

    def finish_step(self, layers: int) -> list[list[int]]:
        """Count the first ``layers`` layers, which compiled code has run; returns for each of them
        the experts that this rank has served, ascending."""
        self._count(range(layers))
        self._statistics.seconds += self._native.record.seconds
        return self._native.experts(range(layers))

    def dispatch(
        self, layer: int, hidden: Tensor, routing: Routing
    ) -> NativeDispatched | list[Bytes]:
        """The rows that this rank serves; or the messages of all ranks, if a header differs.

        Raises:
            ExchangeError: a rank is lost.
            IndexError: an expert id is out of range.
        """
        native = self._native
        ids, rows = routing.expert_ids.contiguous(), hidden.contiguous()
        with self._guard:
            done = self._sockets.run(lambda: native.dispatch(layer, ids, rows))
            self._check(done)
        if done == BAD_ID:
            raise bad_id(self._placements[layer].num_experts)
        if done == OTHERWISE:
            return native.messages
        assigned = native.assigned(layer)
        self._count(range(layer, layer + 1))
        served = len(assigned.token_A)
        own = Routing(torch.from_numpy(assigned.experts_A)[:, None], native.ones[:served])
        rows = native.served[:served].view(hidden.dtype)
        return NativeDispatched(layer, rows, own, True, assigned, routing.weights)

    def combine(self, dispatched: NativeDispatched, rows: Tensor, failures: Failures) -> Combined:
        """Results of this rank's own tokens.

        Raises:
            ExchangeError: a rank is lost.
        """
        native, assigned, rank = self._native, dispatched.assigned, self._rank
        write_failures(rows, rank, failures)
        dtype, weights = dispatched.hidden_states.dtype, dispatched.weights.contiguous()
        total = torch.empty(len(weights), rows.shape[1], dtype=dtype)
        with self._guard:
            done = self._sockets.run(lambda: native.combine(rows, weights, total))
            self._check(done)
        if done != OTHERWISE:
            return Combined(total)
        sent = len(rows) - assigned.served_R[rank]
        received = native.returned[: sum(assigned.returned_R) - assigned.returned_R[rank]]
        return combined(total, True, torch.from_numpy(assigned.position_TK), received, rows[sent:])

    def _check(self, done: int) -> None:
        if done == LOST:
            record = self._native.record
            raise self._sockets.lost(record.lost, record.error)

    def _count(self, layers: range) -> None:
        native, counted = self._native, self._native.counted(layers)
        inline_bytes = len(native.messages[self._rank]) - ID_BYTES.stop
        self._statistics.add(
            layers,
            counted.loads_LE,
            tokens=native.own_tokens * len(layers),
            pairs=counted.pairs,
            served=counted.served,
            sent_bytes=inline_bytes * self._others * len(layers),
            row_bytes=native.width,
            meta_bytes=ID_BYTES.stop * self._others * len(layers),
        )
        result_bytes = native.returned.shape[1] * native.returned.element_size()
        self._statistics.bytes_back += counted.sent_back * result_bytes

    def _prepare(self, hidden: tuple[int, ...], dtype: torch.dtype, ids: tuple[int, ...]) -> bool:
        """Make the compiled state for what ranks brought last; False: this rank brings other shapes
        than then, or compiled code cannot do it."""
        headers = self._inline.steady
        if headers is None or not headers.inline_width or dtype not in _DTYPES:
            return False
        own = headers.ranks[self._rank]
        if (
            dtype != headers.dtype
            or hidden != (own.tokens, own.width // dtype.itemsize)
            or ids != (own.tokens, own.slots)
        ):
            return False
        if headers is not self._headers:
            self._make(headers, self._inline.bytes_R(widest(hidden[1])), hidden[1])
        return True

    def _make(self, headers: RankHeaders, space_R: Sequence[int], hidden: int) -> None:
        native, _ = choose_kernel()
        assert native is not None, "an exchange has sockets only where there is a compiled library"
        self._headers = headers
        self._native = native.all_to_all(
            self._sockets.files,
            self._rank,
            self._sockets.timeout_s,
            headers.raw,
            [(header.tokens, header.slots) for header in headers.ranks],
            headers.inline_width,
            ID_BYTES.stop,
            [ID_BYTES.stop + space for space in space_R],
            hidden,
            self._epoch,
            [(placement.holders, placement.num_experts) for placement in self._placements],
        )
