"""Prompts by DeepEP's interface, with a stand-in for its kernels; our dispatch is the oracle."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import DeviceDispatcher, ExchangeError, Failure, RowKind
from experts.placement import linear
from moe.methods.deep_ep.dispatcher import (
    DeepEPBuffer,
    DeepEPDispatcher,
    _capacity,
    _NotUsed,
    carry_prompts,
    prompts_by_deep_ep,
)
from moe.parallel.worker import new_dispatcher
from moe.settings import ParallelSettings
from routing import Routing
from tests.amounts import amount
from tests.experts.dispatch_cases import ThreadExchange, on_ranks, random_placement
from tests.methods.elastic_buffer import ElasticBuffer, module

HIDDEN, EXPERTS, SLOTS = 32, 8, 3
KIND = RowKind(HIDDEN, SLOTS, torch.bfloat16)


def buffer_of(exchange: ThreadExchange, tokens: int = 64) -> DeepEPBuffer:
    kernels = ElasticBuffer(exchange, num_max_tokens_per_rank=tokens, hidden=HIDDEN, num_topk=SLOTS)
    return DeepEPBuffer(kernels, KIND, tokens, torch.int64)


def tokens_of(rank: int, seed: int, count: int, slots: int = SLOTS) -> tuple[Tensor, Routing]:
    random = torch.Generator().manual_seed(97 * seed + rank)
    ids = torch.rand(count, EXPERTS, generator=random).argsort(1)[:, :slots]
    ids[torch.rand(ids.shape, generator=random) < 0.2] = -1
    weights = torch.rand(ids.shape, generator=random).masked_fill(ids < 0, 0.0)
    hidden = torch.rand(count, HIDDEN, generator=random).bfloat16()
    return hidden, Routing(ids, weights).ascending()


def there_and_back(
    dispatcher: DeviceDispatcher, hidden: Tensor, routing: Routing, lost: int = -1
) -> tuple[Tensor, Tensor]:
    """Rows and codes of failures: expert e multiplies by 1 + e, and one is lost."""
    arrived = dispatcher.dispatch(1, hidden, routing)
    ids, weights = arrived.routing.expert_ids, arrived.routing.weights
    arrived.routing.validate(EXPERTS)
    rows = arrived.hidden_states.float() * (weights * (1 + ids)).sum(1, keepdim=True)
    bad = (ids == lost).any(1).nonzero()[:, 0].tolist() if lost >= 0 else []
    unreadable = Failure("gone", unreadable=bool(lost % 2))
    combined = dispatcher.combine(arrived, rows, dict.fromkeys(bad, unreadable))
    assert combined.codes is not None
    return combined.rows, combined.codes.codes_T


@settings(max_examples=amount(80, quick=20))
@given(
    ranks=st.integers(1, 4),
    extra=st.integers(0, 6),
    lost=st.integers(-1, EXPERTS - 1),
    seed=st.integers(0, 99),
)
def test_rows_failures_and_counters_are_those_of_our_own_dispatch(
    ranks: int, extra: int, lost: int, seed: int
) -> None:
    """Any copies of experts, any number of tokens on each rank, none too, fewer slots on some."""
    placements = [random_placement(EXPERTS, ranks, extra, seed)] * 2
    counts = [(seed * 7 + rank * 5) % 13 for rank in range(ranks)]

    def run(exchange: ThreadExchange) -> Any:
        kernels, rank = buffer_of(exchange), exchange.rank
        dispatchers = [
            DeepEPDispatcher(exchange, exchange, placements, kernels, buffer_rows=0),
            DeviceDispatcher(exchange, exchange, placements, buffer_rows=0),
        ]
        slots = SLOTS - (seed + rank) % 2
        hidden, routing = tokens_of(rank, seed, counts[rank], slots)
        found = [there_and_back(one, hidden, routing, lost) for one in dispatchers]
        counted = [one.statistics for one in dispatchers]
        loads = [one.take_loads().tolist() for one in counted]
        return found, [one.as_dict() for one in counted], loads, kernels.buffer.dispatched

    for result in on_ranks(ranks, run):
        if isinstance(result, Exception):
            raise result
        ((rows, codes), (expected, expected_codes)), counted, loads, dispatched = result
        torch.testing.assert_close(rows.float(), expected.float(), rtol=2**-6, atol=0)
        assert torch.equal(codes, expected_codes)
        assert loads[0] == loads[1]
        same = ("tokens", "pairs", "served", "lower_bound_bytes", "bytes_back", "meta_bytes")
        assert [counted[0][key] for key in same] == [counted[1][key] for key in same]
        assert dispatched == bool(sum(counts))


def test_decode_steps_and_what_the_buffer_does_not_take_go_our_own_way() -> None:
    def run(exchange: ThreadExchange) -> list[int]:
        kernels, found = buffer_of(exchange, tokens=12), []
        placements = [linear(EXPERTS, EXPERTS, 2)] * 2
        dispatcher = DeepEPDispatcher(exchange, exchange, placements, kernels, buffer_rows=4)
        one_rank = exchange.rank == 0
        for count, slots, dtype in (
            (4, SLOTS, torch.bfloat16),  # a decode step
            (5 * one_rank, SLOTS, torch.bfloat16),
            (13 * one_rank, SLOTS, torch.bfloat16),  # more than the buffer takes
            (9, SLOTS + 1, torch.bfloat16),
            (9, SLOTS, torch.float32),
        ):
            hidden, routing = tokens_of(exchange.rank, 1, int(count), slots)
            there_and_back(dispatcher, hidden.to(dtype), routing)
            found.append(kernels.buffer.dispatched)
        return found

    assert on_ranks(2, run) == [[0, 1, 1, 1, 1]] * 2


class Fault:
    """Stand-ins that differ."""

    class Rounded(ElasticBuffer):
        def combine(self, x: Tensor, *how: Any, **more: Any) -> Any:
            return super().combine((x * 1.1).to(x.dtype), *how, **more)

    class Silent(ElasticBuffer):
        """Says nothing of failures."""

        def combine(
            self,
            x: Tensor,
            handle: Any,
            topk_weights: Tensor,
            async_with_compute_stream: bool = False,
        ) -> Any:
            nothing = torch.zeros_like(topk_weights)
            return super().combine(x, handle, nothing, async_with_compute_stream)

    class Absent(ElasticBuffer):
        """Rank 1 cannot make one."""

        def __init__(self, group: Any, **how: Any) -> None:
            if group.rank == 1:
                raise RuntimeError("no NVLink\nat line 7")
            super().__init__(group, **how)

    class Broken(ElasticBuffer):
        def dispatch(self, *how: Any, **more: Any) -> Any:
            raise RuntimeError("its kernel does not compile")


@pytest.mark.parametrize(
    ("package", "dtype", "reason"),
    [
        (module(), torch.bfloat16, ""),
        (module(), torch.float16, "rank 0: hidden states are float16, and DeepEP carries bfloat16"),
        (None, torch.bfloat16, "rank 0: deep_ep is not installed"),
        (SimpleNamespace(), torch.bfloat16, "rank 0: deep_ep has no ElasticBuffer: version 2 is"),
        (
            module(ElasticBuffer=Fault.Rounded),
            torch.bfloat16,
            "rank 0: .* of 64 rows differ from those of our own dispatch",
        ),
        (
            module(ElasticBuffer=Fault.Silent),
            torch.bfloat16,
            "rank 0: rows that failed do not come",
        ),
        (module(ElasticBuffer=Fault.Absent), torch.bfloat16, "rank 1: RuntimeError: no NVLink"),
        (module(ElasticBuffer=Fault.Broken), torch.bfloat16, "rank 0: ExchangeError: rank 0: Deep"),
    ],
)
def test_deep_ep_is_used_if_it_is_there_and_right(
    package: Any, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all ranks or by none, which all give the same reason."""
    monkeypatch.setitem(sys.modules, "deep_ep", package)

    def run(exchange: ThreadExchange) -> tuple[str, str]:
        placements = [linear(EXPERTS, 9, 3)] * 2 + [random_placement(5, 3, 2, 1)]
        made, why = prompts_by_deep_ep(
            exchange, exchange, placements, KIND._replace(dtype=dtype),
            group=exchange, timeout_s=9.5, buffer_rows=0,
        )  # fmt: skip
        assert made.statistics.exchanges == 0
        there_and_back(made, *tokens_of(exchange.rank, 1, 5))
        return type(made).__name__, why

    one, *others = on_ranks(3, run)
    assert not isinstance(one, Exception), one
    assert others == [one] * 2
    assert one[0] == ("DeviceDispatcher" if reason else "DeepEPDispatcher")
    assert re.match(reason, one[1])
    assert bool(one[1]) == bool(reason)


def test_the_buffer_has_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(free: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
        return _capacity(module(), SimpleNamespace(size=4), KIND, torch.device("cuda"))

    assert most(8 * 8 * HIDDEN * 4096) == 4096
    with pytest.raises(_NotUsed, match="its smallest buffer takes 131072 bytes, and there is room"):
        most(8 * 8 * HIDDEN * 511)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"combine": "exact"}, "parallel.combine is exact"),
        ({"payload": "int8"}, "parallel.payload is int8"),
        ({"on_rank_loss": "continue"}, "parallel.on_rank_loss is continue"),
    ],
)
def test_what_deep_ep_does_not_do_goes_our_own_way(asked: Any, reason: str) -> None:
    exchange: Any = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), settle=None)
    exchanges: Any = SimpleNamespace(host=exchange, device=exchange)
    placements = [linear(EXPERTS, EXPERTS, 2)]
    made, why = new_dispatcher(
        exchanges, placements, ParallelSettings(**asked), KIND, carry_prompts
    )
    assert type(made) is DeviceDispatcher
    assert why.startswith(reason)


def test_errors_of_deep_ep_end_the_connection() -> None:
    """It has a bound on each wait; nothing is sent after an error."""

    def run(exchange: ThreadExchange) -> list[str]:
        kernels, said = buffer_of(exchange), []

        def timeout(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CPU wait timed out\nfar below")

        dispatcher = DeepEPDispatcher(
            exchange, exchange, [linear(EXPERTS, EXPERTS, 2)] * 2, kernels, buffer_rows=0
        )
        kernels.buffer.dispatch = timeout
        for act in (
            lambda: there_and_back(dispatcher, *tokens_of(exchange.rank, 0, 5)),
            dispatcher.check,
        ):
            with pytest.raises(ExchangeError) as caught:
                act()
            said.append(str(caught.value))
        return said

    for rank, said in enumerate(on_ranks(2, run)):
        assert said == [f"rank {rank}: DeepEP failed: RuntimeError: CPU wait timed out"] * 2


def test_no_rank_waits_in_deep_ep_before_all_have_come() -> None:
    """Its own wait for sizes holds Python's lock: the bounded one comes first."""

    def run(exchange: ThreadExchange) -> str:
        kernels = buffer_of(exchange)
        dispatcher = DeepEPDispatcher(
            exchange, exchange, [linear(EXPERTS, EXPERTS, 2)] * 2, kernels, buffer_rows=0
        )

        def lost() -> None:
            raise ExchangeError("nothing has come for 120 s")

        exchange.settle = lost  # type: ignore[method-assign]
        with pytest.raises(ExchangeError) as caught:
            there_and_back(dispatcher, *tokens_of(exchange.rank, 0, 5))
        assert kernels.buffer.dispatched == 0
        return str(caught.value)

    assert on_ranks(2, run) == ["nothing has come for 120 s"] * 2
