"""Rows that another rank could not compute, known to the device first: found with the tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.models.loopback import Switchboard, ThreadExchange, on_ranks
from experts.dispatch import DeviceDispatcher, Failure
from experts.dispatch.routing_exchange import exchange_headers
from experts.placement import linear
from moe.engine.in_flight import DrawingStep, End
from moe.engine.runner import _lost_later
from moe.errors import RankError
from moe.network.lanes import ExpertCall, Lane
from moe.network.packed_pass import Work
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from moe.speculate.draft import PLAIN
from offload.errors import OffloadError
from routing import Routing
from tests.readbacks import readbacks, unseen

VOCABULARY = 16


class Sequence(SimpleNamespace):
    """What `DrawingStep` asks of a `RunningSequence`."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def sequence_of() -> Any:
    sampler = Sampler(SamplingParams(temperature=0), [1], VOCABULARY)
    return Sequence(sampler=sampler, cache=None, hold=lambda _: None, held_logits_V=None)


@pytest.mark.parametrize("unreadable", [None, True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_a_step_of_ranks_has_one_readback_unless_rows_are_lost(
    unreadable: bool | None, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 cannot run what rank 0's last token needs, in the first of two layers."""
    host = Switchboard(2)

    def unseen_headers(*arguments: Any) -> Any:
        with unseen():
            return exchange_headers(*arguments)

    monkeypatch.setattr("experts.dispatch.on_device.exchange_headers", unseen_headers)
    monkeypatch.setattr("moe.engine.in_flight.num_unread", lambda _: 0)
    steps: dict[int, Any] = {}

    def run(exchange: ThreadExchange) -> list[str]:
        between_hosts = ThreadExchange(host, exchange.rank)
        dispatcher = DeviceDispatcher(exchange, between_hosts, [linear(4, 4, 2)] * 2)
        ids = torch.tensor([[0], [0], [3]]) if exchange.rank == 0 else torch.tensor([[1]])
        lane: Lane[list[Tensor]] = Lane(list, "decode", len(sizes) if exchange.rank == 0 else 1)
        own = sizes if exchange.rank == 0 else (1,)
        logits = torch.randn(len(own), VOCABULARY)
        expected = logits.argmax(1).tolist()

        def step() -> None:
            for layer in range(2):
                routing = Routing(ids, torch.ones(ids.shape, device=ids.device))
                call = ExpertCall(layer, torch.ones(len(ids), 8, device=ids.device), routing)
                arrived = dispatcher.dispatch(layer, call.hidden_states, call.routing)
                failures = {}
                if unreadable is not None and exchange.rank == 1 and layer == 0:
                    failures = {2: Failure("gone", unreadable=unreadable)}
                combined = dispatcher.combine(arrived, arrived.hidden_states + 0.0, failures)
                call.codes = combined.codes
                lane.note_lost(call)
            work: list[Any] = [Work([7] * size, None) for size in own]  # type: ignore[arg-type]
            found = _lost_later(list(logits.split(1)), [lane], work)
            sequences = [sequence_of() for _ in own]
            ends = [
                End(sequence, rows, PLAIN, lost)
                for sequence, (rows, lost) in zip(sequences, found, strict=True)
            ]
            outcomes = [outcome for _, outcome in DrawingStep(ends).outcomes()]
            steps[exchange.rank] = outcomes, expected

        if exchange.rank:
            step()
            return []
        return readbacks(step)

    found, _ = on_ranks(2, run)
    assert not isinstance(found, Exception), found
    places = [place.rpartition(":")[0] for place in found]
    assert places == ["numpy at moe/sampling/batch.py"] + (
        [] if unreadable is None else ["tolist at moe/network/lanes.py"]
    )
    outcomes, expected = steps[0]
    lost = [] if unreadable is None else [outcomes.pop()]
    assert [tokens[0].id for tokens in outcomes] == expected[: len(outcomes)]
    for error in lost:
        assert type(error) is (OffloadError if unreadable else RankError)
        assert str(error).startswith("rank 1 could not ")


def test_a_sequence_that_draws_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.engine.in_flight.num_unread", lambda _: 2)
    error, rows = RankError("rank 1 could not run it"), torch.zeros(1, VOCABULARY)
    first, second = (sequence_of() for _ in range(2))
    ends = [End(first, rows, None, lambda: error), End(second, rows, None, lambda: None)]
    assert DrawingStep(ends).outcomes() == [(first, error), (second, [])]
