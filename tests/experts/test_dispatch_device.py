"""Dispatch in tensor operations: what one rank gives, nothing read back, the least bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples.models.loopback import Switchboard, ThreadExchange, on_ranks
from experts.dispatch import (
    AllToAllDispatcher,
    DeviceDispatcher,
    ExchangeError,
    Failure,
    RankDispatcher,
)
from experts.dispatch.assignment import serving_ranks
from experts.dispatch.copies import DeviceCopies
from experts.dispatch.exchange import GroupExchange, PeerSockets
from experts.dispatch.routing_exchange import exchange_headers
from experts.dispatch.rows import dequantize, failure, layer_code, quantize
from experts.placement import first_placement, linear
from kernels import experts_forward
from moe.network.lanes import ExpertCall, Lane
from routing import Routing
from tests.experts.dispatch_cases import random_placement
from tests.kernels.kernel_cases import Case, cases, make_case
from tests.readbacks import readbacks, unseen

LAYER = 1


def spread(
    case: Case, ranks: int, seed: int, **options: Any
) -> tuple[Tensor, list[DeviceDispatcher], Tensor]:
    """The rows that ranks make of the tokens dealt to them; and those of one rank."""
    hidden, ids, weights, experts = case.arguments
    routing = Routing(ids, weights).ascending()
    whole = experts_forward(hidden, routing.expert_ids, routing.weights, experts)
    owner = torch.randint(0, ranks, (len(hidden),), generator=torch.Generator().manual_seed(seed))
    placements = [random_placement(experts.num_experts, ranks, seed % 7, seed)] * (LAYER + 1)
    dispatchers: list[Any] = [None] * ranks

    def run(exchange: ThreadExchange) -> Tensor:
        dispatcher = DeviceDispatcher(exchange, exchange, placements, **options)
        dispatchers[exchange.rank] = dispatcher
        mine = owner == exchange.rank
        part = Routing(routing.expert_ids[mine], routing.weights[mine])
        arrived = dispatcher.dispatch(LAYER, hidden[mine], part)
        rows, own = arrived.hidden_states, arrived.routing
        total = torch.zeros(rows.shape)
        experts_forward(rows, own.expert_ids, own.weights, experts, total)
        combined = dispatcher.combine(arrived, total, {})
        assert combined.codes is not None
        assert not combined.codes.codes_T.any()
        return combined.rows

    rows = torch.empty_like(hidden)
    for rank, result in enumerate(on_ranks(ranks, run)):
        if isinstance(result, Exception):
            raise result
        rows[owner == rank] = result
    return rows, dispatchers, whole


@given(case=cases(), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_exact_sums_have_the_bits_of_one_rank(case: Case, ranks: int, seed: int) -> None:
    rows, dispatchers, whole = spread(case, ranks, seed, combine="exact")
    assert torch.equal(rows, whole)
    for dispatcher in dispatchers:
        assert dispatcher.statistics.bytes_out == dispatcher.statistics.lower_bound_bytes / 2


@given(case=cases(), ranks=st.integers(1, 4), seed=st.integers(0, 99), fixed=st.booleans())
def test_summed_sends_a_row_out_and_one_back_for_each_token_and_rank(
    case: Case, ranks: int, seed: int, fixed: bool
) -> None:
    """To the ranks that serve it where sizes are exact, else to all."""
    rows, dispatchers, whole = spread(case, ranks, seed, buffer_rows=None if fixed else 0)
    tolerance = 1e-4 if whole.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(rows.float(), whole.float(), atol=tolerance, rtol=tolerance)
    row, top_k = whole.shape[1] * whole.dtype.itemsize, case.arguments[1].shape[1]
    counted = [dispatcher.statistics for dispatcher in dispatchers]
    pairs = sum(one.pairs for one in counted)
    if fixed:
        assert pairs <= len(whole) * (ranks - 1)
        pairs = len(whole) * (ranks - 1)
    assert sum(one.bytes_out for one in counted) == pairs * (row + 4 * top_k)
    assert sum(one.bytes_back for one in counted) == pairs * row
    loads = np.bincount(case.arguments[1].flatten() + 1, minlength=case.experts.num_experts + 1)[1:]
    for one in counted:
        assert one.take_loads()[LAYER].tolist() == loads.tolist()
    assert sum(one.served for one in counted) == loads.sum()


@given(case=cases(), seed=st.integers(0, 99), fixed=st.booleans())
def test_int8_payload_is_what_rounded_rows_give(case: Case, seed: int, fixed: bool) -> None:
    hidden, ids, weights, experts = case.arguments
    rows, _, _ = spread(case, 3, seed, payload="int8", buffer_rows=None if fixed else 0)
    rounded = dequantize(*quantize(hidden), hidden.dtype)
    routing = Routing(ids, weights).ascending()
    whole = experts_forward(rounded, routing.expert_ids, routing.weights, experts)
    tolerance = 1e-4 if whole.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(rows.float(), whole.float(), atol=tolerance, rtol=tolerance)


class Echo:
    """An exchange with ranks that all send what this one sends."""

    rank, size, same_machine = 1, 3, False
    device = torch.device("cpu")
    sockets: PeerSockets | None = None

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        assert len(sent) == len(received)

        def wait() -> None:
            received.copy_(sent)

        return wait

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("payload", ["plain", "int8"])
def test_a_dispatch_and_a_combine_read_nothing_back(extra: int, payload: Any) -> None:
    """The hosts' own exchange apart, which is between main memories."""
    case = make_case(5, 6, 2, hidden=16, width=16)
    placement, echo = random_placement(6, 3, extra, 1), Echo()
    dispatcher = DeviceDispatcher(echo, echo, [placement], payload=payload)
    headers = exchange_headers(Echo(), (0, 0), case.ids.shape, case.hidden.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experts.dispatch.on_device.exchange_headers", lambda *_: headers)

        def run() -> None:
            arrived = dispatcher.dispatch(0, case.hidden, Routing(case.ids, case.weights))
            rows = arrived.hidden_states.float()
            dispatcher.combine(arrived, rows, {1: Failure("gone", unreadable=True)})

        assert readbacks(run) == []


@pytest.mark.parametrize(("buffer_rows", "sizes"), [(None, 0), (0, 2)])
def test_a_step_of_ranks_reads_back_once(buffer_rows: int | None, sizes: int) -> None:
    """Two layers: what failed, which is known at the end; and exact sizes, once a layer. The hosts'
    own exchange is between main memories; `tests.test_readbacks` has the experts."""
    case, host = make_case(6, 6, 2, hidden=16, width=16), Switchboard(2)
    placement = random_placement(6, 2, 2, 1)

    def run(exchange: ThreadExchange) -> list[str]:
        between_hosts = ThreadExchange(host, exchange.rank)
        dispatcher = DeviceDispatcher(
            exchange, between_hosts, [placement] * 2, buffer_rows=buffer_rows
        )
        hidden, ids, weights = (
            part.tensor_split(2)[exchange.rank] for part in (case.hidden, case.ids, case.weights)
        )
        lane: Lane[None] = Lane(lambda: None)

        def step() -> None:
            for layer in range(2):
                call = ExpertCall(layer, hidden, Routing(ids, weights))
                arrived = dispatcher.dispatch(layer, call.hidden_states, call.routing)
                rows = arrived.hidden_states * arrived.routing.weights.sum(1, keepdim=True)
                failed = {0: Failure("gone", unreadable=True)} if exchange.rank else {}
                call.codes = dispatcher.combine(arrived, rows, failed).codes
                lane.note_lost(call)
            assert bool(lane.lost()) == (exchange.rank == 0)

        if exchange.rank:
            step()
            return []
        return readbacks(step)

    def unseen_headers(*arguments: Any) -> Any:
        with unseen():
            return exchange_headers(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experts.dispatch.on_device.exchange_headers", unseen_headers)
        found, _ = on_ranks(2, run)
    assert not isinstance(found, Exception), found
    *of_layers, last = [place.partition(":")[0] for place in found]
    assert of_layers == ["tolist at experts/dispatch/on_device.py"] * sizes
    assert last == "tolist at moe/network/lanes.py"


@pytest.mark.parametrize("how", [{}, {"buffer_rows": 0}, {"combine": "exact"}])
def test_a_failed_row_reaches_its_token_at_the_end_of_the_step(how: dict[str, Any]) -> None:
    """Rank 1 cannot run expert 2, which rank 0's token 1 and its own token 0 need."""
    ids = {0: [[0], [2], [1]], 1: [[2], [3]]}

    def run(exchange: ThreadExchange) -> tuple[Tensor, dict[int, Failure]]:
        dispatcher = DeviceDispatcher(exchange, exchange, [linear(4, 4, 2)] * 2, **how)
        own = torch.tensor(ids[exchange.rank])
        call = ExpertCall(LAYER, torch.ones(len(own), 32), Routing(own, torch.ones(own.shape)))
        arrived = dispatcher.dispatch(LAYER, call.hidden_states, call.routing)
        bad = (arrived.routing.expert_ids == 2).any(1).nonzero()[:, 0].tolist()
        failures = dict.fromkeys(bad, Failure("of the file system", unreadable=True))
        rows = arrived.hidden_states * arrived.routing.weights
        combined = dispatcher.combine(arrived, rows, failures)
        call.codes = combined.codes
        lane: Lane[None] = Lane(lambda: None)
        lane.note_lost(call)
        return combined.rows, lane.lost()

    why = Failure("rank 1 could not read an expert of MoE layer 1", unreadable=True)
    (rows_0, lost_0), (rows_1, lost_1) = on_ranks(2, run)
    assert lost_0 == {1: why}
    assert lost_1 == {0: why}
    assert rows_0[:, 0].tolist() == [1, 0, 1]
    assert rows_1[:, 0].tolist() == [0, 1]


@given(layer=st.integers(0, 2000), rank=st.integers(0, 2**14 - 2), unreadable=st.booleans())
def test_codes_of_failures_are_unique(layer: int, rank: int, unreadable: bool) -> None:
    found = failure(2 + unreadable + 2 * rank + layer_code(layer))
    assert found.reason.startswith(f"rank {rank} could not ")
    assert found.reason.endswith(f"layer {layer}")
    assert found.unreadable == unreadable


def test_ranks_at_different_layers_notice_before_their_devices_meet() -> None:
    def run(exchange: ThreadExchange) -> None:
        dispatcher = DeviceDispatcher(exchange, exchange, [linear(4, 4, 2)] * 2)
        nothing = Routing(torch.zeros(1, 1).long(), torch.ones(1, 1))
        dispatcher.dispatch(exchange.rank, torch.ones(1, 8), nothing)

    for error in on_ranks(2, run):
        assert isinstance(error, ExchangeError)
        assert "the ranks are out of step: rank " in str(error)


@given(
    ranks=st.integers(1, 6),
    tokens=st.integers(0, 300),
    seed=st.integers(0, 99),
    extra=st.integers(0, 20),
)
def test_every_slot_goes_to_a_rank_that_holds_its_expert(
    ranks: int, tokens: int, seed: int, extra: int
) -> None:
    placement = random_placement(12, ranks, extra, seed)
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 12, generator=random).argsort(1)[:, :3]
    ids[torch.rand(ids.shape, generator=random) < 0.1] = -1
    serving, loads = DeviceCopies(placement, torch.device("cpu")).serving(ids)
    used = ids >= 0
    assert torch.equal(serving < 0, ~used)
    assert (placement.copies_ER[ids[used], serving[used]] > 0).all()
    assert loads.tolist() == np.bincount(ids[used], minlength=12).tolist()


@pytest.mark.parametrize(("tokens", "most"), [(16, 1.4), (64, 1.25), (512, 1.15), (2048, 1.15)])
def test_loads_are_near_the_best_choice_of_copies(tokens: int, most: float) -> None:
    """The heaviest rank's load over that of the best choice, which an algorithm with loops finds;
    the share of reads is bounded, too."""
    random = torch.Generator().manual_seed(tokens)
    popular = torch.rand(64, generator=random) ** 2 + 0.1
    for ranks in (2, 4, 8):
        placement = first_placement("packed", 64, ranks, 0.25)
        ids = torch.multinomial(popular.expand(tokens, -1), 4, generator=random)
        serving, _ = DeviceCopies(placement, torch.device("cpu")).serving(ids)
        source = np.arange(tokens) * ranks // tokens
        best = serving_ranks(ids.numpy(), source, placement)
        heaviest = serving.flatten().bincount(minlength=ranks).max()
        assert heaviest <= most * np.bincount(best.flatten(), minlength=ranks).max()


def test_waiting_for_a_device_ends_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another rank ends while NCCL's kernel waits for it: the group is aborted, and the
    dispatcher raises from then on."""
    aborted = []

    class Never:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return False

    class Comm:
        get_rank = staticmethod(lambda _: 0)
        get_world_size = staticmethod(lambda _: 2)

    group = type("Group", (), {"abort": lambda self: aborted.append(self)})()
    monkeypatch.setattr("experts.dispatch.exchange._comm", lambda: Comm)
    monkeypatch.setattr(torch.cuda, "Event", Never)
    exchange = GroupExchange(group, "cuda", timeout_s=0.05)
    with pytest.raises(ExchangeError, match="rank 0 has lost the other 1 ranks: nothing has come"):
        exchange.settle()
    assert aborted == [group]
    monkeypatch.setattr(Never, "query", lambda _: True)
    exchange.settle()


def test_both_ways_of_ranks_count_the_same() -> None:
    """`AllToAllDispatcher` is the oracle, where no expert has copies."""
    random = torch.Generator().manual_seed(0)
    ids = torch.rand(12, 9, generator=random).argsort(1)[:, :2].sort(1).values

    def run(exchange: ThreadExchange) -> list[dict[str, float]]:
        own = ids.tensor_split(3)[exchange.rank]
        routing, found = Routing(own, torch.ones(own.shape)), []
        dispatchers: list[RankDispatcher[Any]] = [
            AllToAllDispatcher(exchange, [linear(9, 9, 3)], combine="exact", buffer_rows=0),
            DeviceDispatcher(exchange, exchange, [linear(9, 9, 3)], combine="exact"),
        ]
        for dispatcher in dispatchers:
            arrived = dispatcher.dispatch(0, torch.ones(len(own), 4), routing)
            dispatcher.combine(arrived, arrived.hidden_states, {})
            counted = dispatcher.statistics.as_dict()
            found.append({k: v for k, v in counted.items() if k not in ("seconds", "meta_bytes")})
        return found

    for all_to_all, device in on_ranks(3, run):
        assert all_to_all == device
