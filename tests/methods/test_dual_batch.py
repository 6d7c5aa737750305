"""Overlapped steps: the same bits as whole ones, and every rank in step."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import AllToAllDispatcher, DeviceDispatcher, Exchange, ExchangeError
from experts.placement import linear
from kernels import experts_forward
from moe.methods.dual_batch.halves import run_halves
from moe.network.lanes import ExpertCall, Lane, LaneState, call_experts
from moe.network.moe_layer import MoELayers
from tests.experts.dispatch_cases import ThreadExchange, on_ranks
from tests.offload.test_experts import EXPERTS, HIDDEN, LAYERS, Layers, draw_routing, make


def joined(exchange: Exchange, *, device: bool = False) -> tuple[MoELayers, Layers]:
    layers = make(True, False, Random(1))
    experts = MoELayers(layers.resident)
    size = -(-EXPERTS // exchange.size) * exchange.size
    placements = [linear(EXPERTS, size, exchange.size)] * LAYERS
    experts.dispatcher = AllToAllDispatcher(exchange, placements)
    if device:  # a GPU's tensor operations, here in main memory
        experts.dispatcher = DeviceDispatcher(exchange, exchange, placements, combine="exact")
    return experts, layers


def network(layers: Layers | None, visited: list[int], seed: int, fails_at: int = -1) -> Any:
    """A small network of MoE layers with a residual, over whole layers or through a lane."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, HIDDEN, generator=random)
    for layer in visited:
        if layer == fails_at:
            raise ValueError("a lane fails")
        routing = draw_routing(3, 3, random)
        if layers is None:
            given = call_experts(ExpertCall(layer, rows, routing), lambda *_: [])
        else:
            ids, weights = routing.expert_ids, routing.weights
            given = experts_forward(rows, ids, weights, layers.resident[layer])
        rows = torch.tanh(rows + given)
    return rows


@hypothesis_settings(max_examples=20)
@given(seed=st.integers(0, 9999), ranks=st.integers(1, 3))
def test_halves_give_the_same_bits(seed: int, ranks: int) -> None:
    """Any lanes in either half on any rank, some that visit few layers, fail or pause."""

    def rank_of(exchange: ThreadExchange) -> None:
        experts, layers = joined(exchange, device=bool(seed % 2))
        random = Random(seed * 3 + exchange.rank)
        cases = []
        for number in range(random.randrange(5)):
            visited = sorted(random.sample(range(LAYERS), random.randint(0, LAYERS)))
            cases.append((number % 2, visited, number, random.choice((-1, -1, 1))))
        lanes: dict[Lane[Tensor], tuple[int, list[int], int, int]] = {
            Lane(lambda c=case: network(None, *c[1:])): case  # type: ignore[misc]
            for case in cases
        }
        halves = [[lane for lane, case in lanes.items() if case[0] == half] for half in (0, 1)]
        paused = {lane: 1 for lane in lanes if random.random() < 0.5}
        with experts.lockstep(range(1)):
            run_halves(halves, experts, paused | dict.fromkeys(lanes, 1))
        with experts.lockstep(range(1, LAYERS)):
            run_halves(halves, experts)
        for lane, (_, visited, number, fails_at) in lanes.items():
            if fails_at in visited:
                with pytest.raises(ValueError, match="a lane fails"):
                    lane.result()
            else:
                assert torch.equal(lane.result(), network(layers, visited, number))

    with torch.inference_mode():
        for error in on_ranks(ranks, rank_of):
            if error is not None:
                raise error


class Noted:
    """An exchange that notes when rows leave and when they are waited for."""

    def __init__(self, exchange: ThreadExchange, happened: list[str]) -> None:
        self._exchange, self._happened = exchange, happened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def all_to_all(self, *rows: Any) -> Callable[[], None]:
        wait = self._exchange.all_to_all(*rows)
        if rows[0].shape[-1] < 4 * HIDDEN:  # ids, or what hosts tell each other
            return wait
        self._happened.append("send")

        def noted() -> None:
            wait()
            self._happened.append("wait")

        return noted


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_shared_experts_run_while_rows_come_back(halves: bool, fails: bool) -> None:
    """Whole steps and halves; an error is the lane's own, and no other rank's."""

    def rank_of(exchange: ThreadExchange) -> list[str]:
        happened: list[str] = []
        fault = fails and exchange.rank == 1

        def shared() -> None:
            happened.append("shared")
            if fault:
                raise ValueError("a shared expert fails")

        def forward() -> Tensor:
            rows, routing = torch.ones(2, HIDDEN), draw_routing(2, 3, torch.Generator())
            call = ExpertCall(0, rows, routing, beside=shared)
            given = call_experts(call, lambda *_: [])
            happened.append("go on")
            if fault:
                shared()
            return given

        experts, _ = joined(Noted(exchange, happened), device=True)
        lanes = [Lane(forward) for _ in range(2 if halves else 1)]
        with experts.lockstep(range(1)):
            if halves:
                run_halves((lanes[:1], lanes[1:]), experts)
            else:
                lanes[0].start()
                assert lanes[0].call is not None
                (rows,) = experts.run(0, [lanes[0].call])
                assert isinstance(rows, Tensor)
                lanes[0].resume(rows)
        states = {lane.state for lane in lanes}
        assert states == {LaneState.FAILED if fault else LaneState.DONE}
        return happened

    back = ["send", "shared", "wait", "go on"]
    for rank, happened in enumerate(on_ranks(2, rank_of)):
        if isinstance(happened, Exception):
            raise happened
        again = ["shared"] if fails and rank else []
        if halves:
            sent = ["send", "send", "wait", "send", "shared", "wait", "send", "shared"]
            assert happened == [*sent, "wait", "go on", *again, "wait", "go on", *again]
        else:
            assert happened == ["send", "wait", *back, *again]


def test_a_lost_rank_ends_the_lanes_of_both_halves() -> None:
    def rank_of(exchange: ThreadExchange) -> list[LaneState]:
        experts, _ = joined(exchange)
        if exchange.rank == 1:
            raise RuntimeError("killed")
        lanes = [Lane(lambda: network(None, [0, 1], 1)) for _ in range(2)]
        with pytest.raises(ExchangeError, match="rank 0 is alone"):
            halved(experts, lanes)
        with pytest.raises(ExchangeError, match="rank 0 is alone"):
            lanes[0].result()
        return [lane.state for lane in lanes]

    assert on_ranks(2, rank_of)[0] == [LaneState.FAILED, LaneState.CANCELLED]


def halved(experts: MoELayers, lanes: list[Lane[Tensor]]) -> None:
    with experts.lockstep(range(2)):
        run_halves((lanes[:1], lanes[1:]), experts)
