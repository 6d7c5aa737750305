"""Lanes on toy forwards: meeting, sleeping, cancelling, failing, and torch's modes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.network.lanes import ExpertCall, Lane, LaneCancelled, LaneState, call_experts, run_lanes
from routing import Routing


class Experts:
    """Stands for MoE layers: adds ``layer + 1`` and remembers who met where."""

    def __init__(self) -> None:
        self.meetings: list[tuple[int, int]] = []

    def __call__(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        self.meetings.append((layer, len(calls)))
        return [call.hidden_states + layer + 1 for call in calls]


def forward(start: float, layers: Sequence[int], experts: Experts) -> Callable[[], Tensor]:
    def run() -> Tensor:
        hidden = torch.full((2, 3), start)
        for layer in layers:
            hidden = call(hidden * 2, layer, experts)
        return hidden

    return run


def call(hidden: Tensor, layer: int, experts: Experts) -> Tensor:
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    return call_experts(ExpertCall(layer, hidden, routing), experts)


def alone(start: float, layers: Sequence[int]) -> Tensor:
    return forward(start, layers, Experts())()


def test_lanes_share_one_run_of_a_layer() -> None:
    experts = Experts()
    lanes = [Lane(forward(start, range(3), experts)) for start in (1.0, 5.0)]
    run_lanes(lanes, experts)
    assert experts.meetings == [(0, 2), (1, 2), (2, 2)]
    for lane, start in zip(lanes, (1.0, 5.0), strict=True):
        assert torch.equal(lane.result(), alone(start, range(3)))


def test_a_lane_alone_is_served_without_sleeping() -> None:
    experts, others = Experts(), Experts()
    lane = Lane(forward(1.0, range(3), others), "decode")
    phases = []

    def serve(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        phases.append(calls[0].phase)
        return experts(layer, calls)

    run_lanes([lane], serve)
    assert experts.meetings == [(0, 1), (1, 1), (2, 1)]
    assert others.meetings == []
    assert phases == ["decode"] * 3
    assert torch.equal(lane.result(), alone(1.0, range(3)))
    # Whoever visits outside of a lane afterwards is served by its own experts again.
    call(torch.ones(2, 3), 0, others)
    assert others.meetings == [(0, 1)]


def test_what_experts_raise_reaches_a_lane_alone() -> None:
    def broken(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        raise ValueError(f"layer {layer}")

    lane = Lane(forward(1.0, range(3), Experts()))
    run_lanes([lane], broken)
    assert lane.state is LaneState.FAILED
    with pytest.raises(ValueError, match="layer 0"):
        lane.result()


def test_a_late_lane_catches_up_with_a_sleeping_one() -> None:
    experts = Experts()
    prefill = Lane(forward(1.0, range(4), experts))
    run_lanes([prefill], experts, pause_at={prefill: 2})
    assert prefill.state is LaneState.WAITING
    decode = Lane(forward(2.0, range(4), experts))
    run_lanes([prefill, decode], experts)
    assert experts.meetings == [(0, 1), (1, 1), (0, 1), (1, 1), (2, 2), (3, 2)]
    assert torch.equal(prefill.result(), alone(1.0, range(4)))
    assert torch.equal(decode.result(), alone(2.0, range(4)))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), min_size=1, max_size=4)
)
def test_any_stagger_and_cancellation_leaves_each_result(
    plan: list[tuple[int, int, bool]],
) -> None:
    experts = Experts()
    lanes: list[Lane[Tensor]] = []
    for index, (num_layers, pause, _) in enumerate(plan):
        lanes.append(Lane(forward(float(index), range(num_layers), experts)))
        run_lanes(lanes, experts, pause_at=dict.fromkeys(lanes, pause))
    for lane, (_, _, cancelled) in zip(lanes, plan, strict=True):
        if cancelled and not lane.finished:
            lane.cancel()
    run_lanes(lanes, experts)
    for index, (lane, (num_layers, _, _)) in enumerate(zip(lanes, plan, strict=True)):
        if lane.state is not LaneState.CANCELLED:
            assert torch.equal(lane.result(), alone(float(index), range(num_layers)))


def test_cancelling_frees_what_the_forward_held() -> None:
    experts, held = Experts(), []

    def run() -> Tensor:
        activations = torch.ones(2, 3)
        held.append(weakref.ref(activations))
        call(torch.zeros(2, 3), 0, experts)
        return activations

    lane = Lane(run)
    lane.start()
    assert held[0]() is not None
    lane.cancel()
    gc.collect()
    assert held[0]() is None
    assert lane.call is None
    with pytest.raises(LaneCancelled, match="cancelled before it had a result"):
        lane.result()


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_passes_through_and_ends_the_lane(count: int) -> None:
    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    lanes = [Lane(interrupted) for _ in range(count)]
    with pytest.raises(KeyboardInterrupt):
        run_lanes(lanes, Experts())
    for lane in lanes:
        lane.cancel()
        with pytest.raises(LaneCancelled):
            lane.result()


def test_cancelling_a_lane_that_never_started_runs_nothing() -> None:
    ran = []
    lane: Lane[None] = Lane(lambda: ran.append(1))
    lane.cancel()
    run_lanes([lane], Experts())
    assert ran == []
    assert lane.state is LaneState.CANCELLED


def test_cancelling_runs_the_forward_s_own_clean_up() -> None:
    experts, log = Experts(), []

    def run() -> None:
        try:
            call(torch.zeros(2, 3), 0, experts)
        finally:
            log.append("released")

    lane = Lane(run)
    lane.start()
    lane.cancel()
    assert log == ["released"]


def test_an_exception_reaches_its_caller_and_leaves_the_others_running() -> None:
    experts = Experts()

    def broken() -> Tensor:
        call(torch.zeros(2, 3), 0, experts)
        raise RuntimeError("lane is broken")

    lanes = [Lane(broken), Lane(forward(1.0, range(2), experts))]
    run_lanes(lanes, experts)
    with pytest.raises(RuntimeError, match="lane is broken"):
        lanes[0].result()
    assert torch.equal(lanes[1].result(), alone(1.0, range(2)))


def test_failing_experts_reach_every_lane_that_waited_there() -> None:
    def failing(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        if layer == 1:
            raise OSError("expert 3 cannot be read")
        return [call.hidden_states for call in calls]

    experts = Experts()
    lanes = [Lane(forward(1.0, layers, experts)) for layers in ([0, 1], [0, 1], [0, 2])]
    run_lanes(lanes, failing)
    for lane in lanes[:2]:
        with pytest.raises(OSError, match="expert 3 cannot be read"):
            lane.result()
    assert lanes[2].state is LaneState.DONE


def test_each_lane_keeps_its_own_modes() -> None:
    experts = Experts()
    seen: list[tuple[str | bool, ...]] = []

    def run(name: str) -> None:
        with torch.no_grad():
            call(torch.zeros(2, 3), 0, experts)
            seen.append((name, "inside", torch.is_grad_enabled()))
        call(torch.zeros(2, 3), 1, experts)
        seen.append((name, "outside", torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    training = Lane(lambda: run("training"))
    with torch.inference_mode():
        serving = Lane(lambda: run("serving"))
    run_lanes([training, serving], experts)
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (True, False)
    assert sorted(seen) == [
        ("serving", "inside", False),
        ("serving", "outside", False, True),
        ("training", "inside", False),
        ("training", "outside", True, False),
    ]


def test_gradients_flow_through_a_meeting() -> None:
    weight = torch.ones(3, requires_grad=True)

    def experts(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        return [call.hidden_states * weight for call in calls]

    inputs = [torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)]
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    lanes = [Lane(partial(call_experts, ExpertCall(0, rows, routing), experts)) for rows in inputs]
    run_lanes(lanes, experts)
    (lanes[0].result().sum() + lanes[1].result().sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0, 10.0, 10.0]


def test_outside_of_a_lane_experts_run_at_once() -> None:
    experts = Experts()
    assert torch.equal(call(torch.zeros(2, 3), 4, experts), torch.full((2, 3), 5.0))
    assert experts.meetings == [(4, 1)]


@pytest.mark.parametrize("end", ["done", "cancelled", "never started"])
def test_a_lane_that_ended_is_freed_at_once(end: str) -> None:
    """Not when Python's collector comes: it counts objects, and these hold tensors."""

    experts = Experts()
    gc.disable()
    try:
        lane = Lane(forward(1.0, [0], experts))
        if end != "never started":
            run_lanes([lane], experts, pause_at={} if end == "done" else {lane: 0})
        lane.cancel()
        freed = weakref.ref(lane)
        del lane
        assert freed() is None
    finally:
        gc.enable()
