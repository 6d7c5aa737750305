"""Tokens to ranks and back: the bits of one rank, whatever the ranks, copies and placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import (
    AllToAllDispatcher,
    Combined,
    ExchangeError,
    Failure,
    LocalDispatcher,
)
from experts.dispatch.rows import dequantize, quantize, read_failures, write_failures
from experts.placement import linear
from kernels import experts_forward
from kernels.reference import AnyExperts
from routing import Routing
from tests.experts.dispatch_cases import ThreadExchange, on_ranks, random_placement
from tests.kernels.kernel_cases import Case, cases
from tests.kernels.plane_cases import LayerCase, layers

LAYER = 3


def alone(case: Case | LayerCase) -> tuple[Tensor, Routing, AnyExperts, Tensor]:
    """A layer and what it gives with all experts at hand."""
    hidden, ids, weights, experts = case.arguments
    routing = Routing(ids, weights).ascending()
    whole = experts_forward(hidden, routing.expert_ids, routing.weights, experts)
    return hidden, routing, experts, whole


def pass_through(
    dispatcher: AllToAllDispatcher, hidden: Tensor, routing: Routing, experts: AnyExperts
) -> Combined:
    arrived = dispatcher.dispatch(LAYER, hidden, routing)
    rows, own = arrived.hidden_states, arrived.routing
    total = torch.zeros(rows.shape)
    experts_forward(rows, own.expert_ids, own.weights, experts, total)
    return dispatcher.combine(arrived, total, {})


def spread(
    case: Case | LayerCase, ranks: int, seed: int, **options: Any
) -> tuple[Tensor, list[AllToAllDispatcher], Tensor]:
    """The rows that ranks make of the tokens dealt to them, in the order of tokens."""
    hidden, routing, experts, whole = alone(case)
    random = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, ranks, (len(hidden),), generator=random)
    placements = [random_placement(experts.num_experts, ranks, seed % 7, seed)] * (LAYER + 1)
    dispatchers: list[Any] = [None] * ranks

    def run(exchange: ThreadExchange) -> Tensor:
        dispatcher = AllToAllDispatcher(exchange, placements, **options)
        dispatchers[exchange.rank] = dispatcher
        mine = owner == exchange.rank
        part = Routing(routing.expert_ids[mine], routing.weights[mine])
        combined = pass_through(dispatcher, hidden[mine], part, experts)
        assert not combined.failures
        return combined.rows

    rows = torch.empty_like(hidden)
    for rank, result in enumerate(on_ranks(ranks, run)):
        if isinstance(result, Exception):
            raise result
        rows[owner == rank] = result
    return rows, dispatchers, whole


some_layer = st.one_of(cases(), layers())


@given(
    case=some_layer,
    ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
    buffer_rows=st.sampled_from([None, 0, 0, 1, 3, 99]),
)
def test_exact_sums_have_the_bits_of_one_rank(
    case: Case | LayerCase, ranks: int, seed: int, buffer_rows: int
) -> None:
    rows, dispatchers, whole = spread(case, ranks, seed, buffer_rows=buffer_rows)
    assert torch.equal(rows, whole)
    for dispatcher in dispatchers:
        counted = dispatcher.statistics
        least = counted.lower_bound_bytes / 2
        assert counted.bytes_out == least or (buffer_rows and counted.bytes_out > least)


@given(case=some_layer, ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_summed_is_the_same_up_to_order_and_sends_the_least(
    case: Case | LayerCase, ranks: int, seed: int
) -> None:
    rows, dispatchers, whole = spread(case, ranks, seed, combine="summed")
    tolerance = 1e-4 if whole.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(rows.float(), whole.float(), atol=tolerance, rtol=tolerance)
    back = sum(dispatcher.statistics.bytes_back for dispatcher in dispatchers)
    assert back == sum(d.statistics.lower_bound_bytes for d in dispatchers) / 2


@given(
    case=cases(),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 99),
    buffer_rows=st.sampled_from([None, 0, 4]),
)
def test_int8_payload_is_what_rounded_rows_give(
    case: Case, ranks: int, seed: int, buffer_rows: int
) -> None:
    hidden, routing, experts, _ = alone(case)
    rows, _, _ = spread(case, ranks, seed, payload="int8", buffer_rows=buffer_rows)
    rounded = dequantize(*quantize(hidden), hidden.dtype)  # as the receiver sees them
    expected = experts_forward(rounded, routing.expert_ids, routing.weights, experts)
    assert torch.equal(rows, expected)
    error = (rounded.float() - hidden.float()).abs()
    assert (error <= hidden.float().abs().amax(1, keepdim=True) / 127).all()


@given(case=some_layer, seed=st.integers(0, 99))
def test_rows_in_static_buffers_need_two_exchanges(case: Case | LayerCase, seed: int) -> None:
    """And give the sums that rows in buffers of exact size give, weights included."""
    started = []
    start = ThreadExchange.all_to_all

    def count(self: ThreadExchange, *arguments: Any) -> Any:
        started.append(self.rank)
        return start(self, *arguments)

    exact, _, _ = spread(case, 3, seed, combine="summed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadExchange, "all_to_all", count)
        static, _, _ = spread(case, 3, seed, combine="summed", buffer_rows=99)
    assert torch.equal(static, exact)
    if len(exact):
        assert len(started) == 3 * 2


def test_rows_go_along_where_nearly_all_are_needed_everywhere() -> None:
    """Once a layer has shown how many there are: two exchanges instead of three."""
    brought = [4, 4, 4, 6, 6, 2, 2]

    def run(exchange: ThreadExchange) -> tuple[list[Tensor], list[int]]:
        started, start, found = [0], exchange.all_to_all, []

        def count(*arguments: Any) -> Any:
            started[-1] += 1
            return start(*arguments)

        exchange.all_to_all = count  # type: ignore[assignment, method-assign]
        buffer_rows = 0 if exact else None
        dispatcher = AllToAllDispatcher(exchange, [linear(16, 16, 2)], buffer_rows=buffer_rows)
        random = torch.Generator().manual_seed(exchange.rank)
        for tokens in brought:
            ids = torch.rand(tokens, 16, generator=random).argsort(1)[:, :8].sort(1).values
            routing = Routing(ids, torch.rand(tokens, 8, generator=random))
            arrived = dispatcher.dispatch(0, torch.rand(tokens, 5, generator=random), routing)
            rows = arrived.hidden_states * (1 + arrived.routing.expert_ids)
            found.append(dispatcher.combine(arrived, rows, {}).rows)
            started.append(0)
        return found, started[:-1]

    exact = False
    along = on_ranks(2, run)
    exact = True
    for (rows, started), (expected, always) in zip(along, on_ranks(2, run), strict=True):
        assert all(map(torch.equal, rows, expected))
        assert always == [3] * len(brought)
        assert started == [3, 2, 2, 3, 2, 2, 2]


def test_nobody_has_tokens() -> None:
    def run(exchange: ThreadExchange) -> int:
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        arrived = dispatcher.dispatch(
            0, torch.empty(0, 8), Routing(torch.empty(0, 2).long(), torch.empty(0, 2))
        )
        return len(dispatcher.combine(arrived, arrived.hidden_states, {}).rows)

    assert on_ranks(2, run) == [0, 0]


def test_many_tokens_of_one_rank_all_to_one_expert() -> None:
    """More ids than the first message holds, from one rank; the other has none."""
    hidden = torch.randn(900, 8)

    def run(exchange: ThreadExchange) -> Tensor:
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        mine = hidden if exchange.rank == 0 else hidden[:0]
        ids = torch.full((len(mine), 1), 3)
        arrived = dispatcher.dispatch(0, mine, Routing(ids, torch.full((len(mine), 1), 0.5)))
        assert len(arrived.hidden_states) == (900 if exchange.rank == 1 else 0)
        assert (arrived.routing.expert_ids == 3).all()
        return dispatcher.combine(arrived, arrived.hidden_states * 2, {}).rows

    first, second = on_ranks(2, run)
    assert torch.equal(first, hidden)
    assert len(second) == 0


def test_failures_reach_the_tokens_concerned_and_no_others() -> None:
    ids = torch.tensor([[0, 2], [1, 3], [0, 1]])

    def run(exchange: ThreadExchange) -> Combined:
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        arrived = dispatcher.dispatch(0, torch.ones(3, 64), Routing(ids, torch.ones(3, 2)))
        lost = (arrived.routing.expert_ids == 3).any(1).nonzero()[:, 0].tolist()
        rows = arrived.hidden_states.clone()
        return dispatcher.combine(arrived, rows, dict.fromkeys(lost, Failure("disk broken", True)))

    for combined in on_ranks(2, run):
        assert combined.failures == {1: Failure("rank 1: disk broken", True)}
        assert combined.rows[:, 0].tolist() == [2, 0, 2]


def test_rows_that_are_no_numbers_stay_with_their_token() -> None:
    hidden, ids = torch.ones(3, 64), torch.tensor([[0, 2], [1, 3], [0, 1]])
    hidden[1] = float("nan")

    def run(exchange: ThreadExchange) -> Combined:
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        arrived = dispatcher.dispatch(0, hidden, Routing(ids, torch.ones(3, 2)))
        return dispatcher.combine(arrived, arrived.hidden_states.clone(), {})

    for combined in on_ranks(2, run):
        assert not combined.failures
        assert combined.rows.isnan().any(1).tolist() == [False, True, False]
        assert (combined.rows[::2] == 2).all()


def test_new_placements_between_steps() -> None:
    placements = linear(4, 4, 2), random_placement(4, 2, 2, 5)
    hidden, ids = torch.randn(6, 8), torch.arange(12).reshape(6, 2) % 4
    routing = Routing(ids, torch.rand(6, 2)).ascending()

    def run(exchange: ThreadExchange) -> list[Tensor]:
        dispatcher = AllToAllDispatcher(exchange, [placements[0], placements[0]])
        found = []
        for epoch in range(3):
            arrived = dispatcher.dispatch(0, hidden, routing)
            rows = arrived.hidden_states * (1 + arrived.routing.expert_ids)
            found.append(dispatcher.combine(arrived, rows, {}).rows)
            dispatcher.apply_placements(epoch + 1, {0: placements[(epoch + 1) % 2]})
        assert dispatcher.statistics.take_loads().tolist() == [[18] * 4, [0] * 4]
        return found

    for found in on_ranks(2, run):
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_ranks_with_different_placements_notice() -> None:
    def run(exchange: ThreadExchange) -> None:
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        dispatcher.apply_placements(exchange.rank, {})
        dispatcher.dispatch(
            0, torch.ones(1, 8), Routing(torch.zeros(1, 1).long(), torch.ones(1, 1))
        )

    first, second = on_ranks(2, run)
    assert isinstance(first, ExchangeError)
    assert isinstance(second, ExchangeError)
    assert "rank 0 is at epoch 0, rank 1 at epoch 1" in str(first)


def test_a_lost_rank_breaks_the_dispatcher_for_good() -> None:
    def run(exchange: ThreadExchange) -> str:
        if exchange.rank == 1:
            raise RuntimeError("killed")
        dispatcher = AllToAllDispatcher(exchange, [linear(4, 4, 2)])
        nothing = Routing(torch.empty(0, 1).long(), torch.empty(0, 1))
        dispatcher.check()
        for _ in range(2):
            with pytest.raises(ExchangeError, match="rank 0 is alone"):
                dispatcher.dispatch(0, torch.empty(0, 8), nothing)
        with pytest.raises(ExchangeError, match="rank 0 is alone"):
            dispatcher.check()
        return "noticed"

    assert on_ranks(2, run)[0] == "noticed"


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (linear(4, 6, 3), "a placement is for 3 ranks; there are 2"),
        (linear(40000, 40000, 2), "a layer has 40000 experts; dispatch counts to 32767"),
    ],
)
def test_unsuitable_placements_are_refused(placement: Any, reason: str) -> None:
    def run(exchange: ThreadExchange) -> None:
        AllToAllDispatcher(exchange, [placement])

    error = on_ranks(2, run)[0]
    assert isinstance(error, ValueError)
    assert str(error) == reason


def test_one_rank_keeps_its_rows() -> None:
    dispatcher = LocalDispatcher()
    rows = torch.ones(2, 4)
    routing = Routing(torch.zeros(2, 1).long(), torch.ones(2, 1))
    arrived = dispatcher.dispatch(0, rows, routing)
    dispatcher.check()
    assert arrived.hidden_states is rows
    assert arrived.routing is routing
    failures = {1: Failure("lost", True)}
    assert dispatcher.combine(arrived, rows, failures) == Combined(rows, failures)


@given(
    width=st.integers(16, 160),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    text=st.text(max_size=60),
    unreadable=st.booleans(),
)
def test_reasons_travel_in_the_row(
    width: int, dtype: torch.dtype, text: str, unreadable: bool
) -> None:
    rows = torch.randn(3, width // dtype.itemsize, dtype=dtype)
    kept = rows.clone()
    write_failures(rows, 3, {1: Failure(text, unreadable)})
    text = f"rank 3: {text}"
    reason, kind = read_failures(rows)[1]
    assert kind == unreadable
    assert text.rstrip("\0").startswith(reason)
    assert len(reason.encode()) > width - 20 or reason == text.rstrip("\0")
    assert torch.equal(rows[[0, 2]], kept[[0, 2]])
    assert rows[1, 0].isnan()
