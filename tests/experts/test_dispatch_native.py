"""Dispatch and combine by compiled code give the same bits and send the same bytes as by Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import AllToAllDispatcher, Combined, ExchangeError, Failure, SocketExchange
from experts.dispatch.native import NativeDispatched
from experts.placement import Placement, linear
from routing import Routing
from tests.experts.dispatch_cases import random_placement
from tests.experts.test_dispatch_sockets import connected, in_threads

EXPERTS, HIDDEN = 6, 5
Step = list[tuple[Tensor, Routing]]
"""What each rank brings to a layer."""


def drawn(
    sizes: list[int], slots: int, hot: bool, dtype: torch.dtype, random: torch.Generator
) -> Step:
    found = []
    for tokens in sizes:
        keys = torch.rand(tokens, EXPERTS, generator=random)
        keys -= 10 * torch.arange(EXPERTS) if hot else 0
        ids = keys.argsort(1, descending=True)[:, :slots].sort(1).values
        unused = torch.rand(tokens, slots, generator=random) < 0.1
        routing = Routing(ids.masked_fill(unused, -1), torch.rand(tokens, slots, generator=random))
        hidden = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
        found.append((hidden, routing.ascending()))
    return found


def run(
    steps: list[Step],
    placement: Placement,
    *,
    compiled: Callable[[int], bool] = lambda _: True,
    lost: int = -1,
    buffer_rows: int | None = 9,
    **settings: Any,
) -> tuple[list[Any], list[AllToAllDispatcher]]:
    """Of each rank what came back from each step, and how many were compiled."""
    exchanges = connected(len(steps[0]))
    for exchange in exchanges:
        if not compiled(exchange.rank):
            exchange.sockets = None
    settings |= {"buffer_rows": buffer_rows}
    dispatchers = [AllToAllDispatcher(one, [placement], **settings) for one in exchanges]

    def one(rank: int) -> tuple[list[Combined], int]:
        found, native = [], 0
        for step in steps:
            arrived = dispatchers[rank].dispatch(0, *step[rank])
            native += isinstance(arrived, NativeDispatched)
            ids = arrived.routing.expert_ids
            rows = arrived.hidden_states.float() * (1 + ids[:, :1])
            failed = (ids[:, 0] == lost).nonzero()[:, 0].tolist()
            failures = dict.fromkeys(failed, Failure("no such disk", True))
            found.append(dispatchers[rank].combine(arrived, rows, failures))
        return found, native

    found = in_threads([lambda rank=rank: one(rank) for rank in range(len(exchanges))])  # type: ignore[misc]
    for exchange in exchanges:
        exchange.close()
    for error in found:
        if isinstance(error, Exception):
            raise error
    return found, dispatchers


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    slots=st.integers(1, 4),
    hot=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lost=st.sampled_from([-1, -1, 2]),
    mixed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_bits_and_bytes_of_python(
    sizes: list[int], slots: int, hot: bool, dtype: torch.dtype, lost: int, mixed: bool, seed: int
) -> None:
    """Any shapes, copies, ranks without tokens, all tokens on one rank, failures, ranks that go
    either way; in the middle, one brings something else."""
    random = torch.Generator().manual_seed(seed)
    other = [sizes[0] + 1, *sizes[1:]]
    steps = [drawn(now, slots, hot, dtype, random) for now in (*[sizes] * 4, other, *[sizes] * 4)]
    placement = random_placement(EXPERTS, len(sizes), seed % 5, seed)
    expected, plain = run(steps, placement, compiled=lambda _: False, lost=lost)
    found, swift = run(
        steps, placement, compiled=lambda rank: rank % 2 == 0 or not mixed, lost=lost
    )
    for rank, ((wanted, never), (got, native)) in enumerate(zip(expected, found, strict=True)):
        assert never == 0
        if (not mixed or rank % 2 == 0) and any(sizes):
            assert native == 4
        for one, two in zip(wanted, got, strict=True):
            assert torch.equal(one.rows, two.rows)
            assert one.failures == two.failures
        counted, before = swift[rank].statistics, plain[rank].statistics
        assert counted.take_loads().tolist() == before.take_loads().tolist()
        assert counted.as_dict() | {"seconds": 0} == before.as_dict() | {"seconds": 0}


@pytest.mark.parametrize(
    ("ranks", "slots", "buffer_rows", "combine", "native"),
    [
        (3, 2, None, "exact", 3),  # 4 rows of 9 are not needed where they go
        (3, 1, None, "exact", 0),  # 6 of 9
        (3, 2, 0, "exact", 0),
        (3, 2, None, "summed", 0),  # the least bytes
    ],
)
def test_rows_that_some_do_not_need_are_inline_on_one_machine(
    ranks: int, slots: int, buffer_rows: int | None, combine: str, native: int
) -> None:
    random = torch.Generator().manual_seed(0)
    steps = [drawn([2] * ranks, slots, False, torch.float32, random) for _ in range(6)]
    placement = random_placement(EXPERTS, ranks, 0, 0)
    found, _ = run(steps, placement, buffer_rows=buffer_rows, combine=combine)
    assert [went for _, went in found] == [native] * ranks


def steady(
    hidden: int = 8, timeout_s: float = 20.0
) -> tuple[list[SocketExchange], list[AllToAllDispatcher], Any]:
    """Two ranks that have brought the same twice."""
    exchanges = connected(2, timeout_s)
    ids = torch.tensor([[0, 2], [1, 3]])
    brought = torch.ones(2, hidden), Routing(ids, torch.ones(2, 2))
    made = [AllToAllDispatcher(one, [linear(4, 4, 2)] * 2, buffer_rows=2) for one in exchanges]

    def warm(dispatcher: AllToAllDispatcher) -> None:
        for _ in range(3):
            arrived = dispatcher.dispatch(0, *brought)
            dispatcher.combine(arrived, arrived.hidden_states.clone(), {})
        assert isinstance(arrived, NativeDispatched)

    assert in_threads([lambda d=d: warm(d) for d in made]) == [None, None]  # type: ignore[misc]
    return exchanges, made, brought


def test_large_rows_need_more_than_sockets_hold() -> None:
    """Both send before either receives."""
    exchanges, _, _ = steady(hidden=1 << 20)
    for exchange in exchanges:
        exchange.close()


def test_a_rank_that_is_gone_is_named() -> None:
    exchanges, (first, _), brought = steady()
    exchanges[1].close()
    for _ in range(2):
        with pytest.raises(ExchangeError, match="rank 0 has lost rank 1: "):
            first.dispatch(0, *brought)


def test_a_rank_that_is_silent_is_named() -> None:
    exchanges, (first, _), brought = steady(timeout_s=1.5)  # for what comes before, too
    with pytest.raises(ExchangeError, match=r"heard nothing from rank 1 for 1\.5 s"):
        first.dispatch(0, *brought)
    exchanges[1].close()


def test_ranks_at_different_layers_notice() -> None:
    _, (first, second), brought = steady()
    errors = in_threads([lambda: first.dispatch(0, *brought), lambda: second.dispatch(1, *brought)])
    assert "rank 0 is at layer 0, rank 1 at layer 1" in str(errors[0])
    assert "rank 1 is at layer 1, rank 0 at layer 0" in str(errors[1])


def test_an_id_that_is_no_expert_is_refused() -> None:
    _, made, (hidden, routing) = steady()
    wrong = Routing(routing.expert_ids + 1, routing.weights)
    errors = in_threads([lambda d=d: d.dispatch(0, hidden, wrong) for d in made])  # type: ignore[misc]
    assert [str(error) for error in errors] == [r"an expert id is outside [-1, 4)"] * 2
    assert all(isinstance(error, IndexError) for error in errors)
