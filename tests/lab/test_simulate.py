"""The simulator: cases that can be worked out by hand, and the published figures it is held to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dispatch_cost import dispatch_seconds, drawn
from experts.dispatch.all_to_all import CombineMode
from experts.placement import linear
from lab.simulation.__main__ import scale
from lab.simulation.costs import Costs, Network
from lab.simulation.published import deep_ep
from lab.simulation.routing import Routed
from lab.simulation.runs import against
from lab.simulation.simulator import lanes_of, simulate

pytestmark = pytest.mark.deep


NETWORK = Network(ranks_a_node=2, near=1000.0, far=100.0, latency_s=1.0)
COSTS = Costs(
    attention_s=10.0,
    attention_token_s=1.0,
    expert_s=5.0,
    slot_s=2.0,
    out_bytes=100.0,
    back_bytes=200.0,
    step_s=7.0,
)


def test_an_exchange_waits_for_the_last_and_for_the_slowest_link() -> None:
    nothing = np.zeros((4, 4))
    assert NETWORK.exchange(np.array([0.0, 3.0, 1.0, 2.0]), nothing).tolist() == [4.0] * 4
    sent = np.zeros((4, 4))
    sent[0, 1] = 1000.0  # near: a second
    assert NETWORK.exchange(np.zeros(4), sent).tolist() == [2.0] * 4
    sent[0, 2] = 1000.0  # far, at the same time: ten
    assert NETWORK.exchange(np.zeros(4), sent).tolist() == [11.0] * 4
    sent[:] = 0.0
    sent[0, 3] = sent[1, 3] = 1000.0  # its link takes in both
    assert NETWORK.exchange(np.zeros(4), sent).tolist() == [11.0, 11.0, 11.0, 21.0]
    np.fill_diagonal(sent, 1e9)  # its own rows do not travel
    assert NETWORK.exchange(np.zeros(4), sent).max() == 21.0


def test_two_ranks_and_two_tokens_by_hand() -> None:
    """Rank 0 holds expert 0, rank 1 holds expert 1; both tokens go to expert 1."""
    ids = np.array([[1], [1]])
    lanes = lanes_of([ids], [linear(2, 2, 2)], 1)
    step = simulate(lanes, 1, COSTS, NETWORK)
    attention, out, experts, back = 11.0, 100 / 1000 + 1, 5 + 2 * 2.0, 200 / 1000 + 1
    assert step.seconds == pytest.approx(attention + out + experts + back + 7.0)
    assert step.bytes_a_token == (100 + 200) / 2
    assert step.imbalance == 2.0
    busy = (attention + attention + experts) / 2
    assert step.idle == pytest.approx(1 - busy / (step.seconds - 7.0))
    again = simulate(lanes, 3, COSTS, NETWORK)  # layers are gone through in turn
    assert again.seconds - 7.0 == pytest.approx(3 * (step.seconds - 7.0))


def test_a_second_lane_hides_exchanges_but_reads_experts_again() -> None:
    ids = drawn(64, 16, 4, 0.0, 0)
    placements = [linear(16, 16, 4)]
    one, two = (lanes_of([ids], placements, count) for count in (1, 2))
    slow = Network(4, 1e3, 1e3, 20.0)
    cheap = Costs(0.0, 1.0, 0.0, 1.0, 10.0, 10.0)
    assert simulate(two, 6, cheap, slow).seconds < simulate(one, 6, cheap, slow).seconds
    dear = Costs(0.0, 0.0, 50.0, 0.0, 10.0, 10.0)
    fast = Network(4, 1e9, 1e9, 0.0)
    assert simulate(two, 6, dear, fast).seconds > simulate(one, 6, dear, fast).seconds


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 2), st.integers(0, 2**32))
def test_nothing_is_faster_than_its_work_or_slower_than_one_thing_after_the_other(
    ranks: int, tokens: int, count: int, seed: int
) -> None:
    ids = drawn(max(tokens, count), 12, 3, 1.0, seed)
    lanes = lanes_of([ids], [linear(12, 12 if 12 % ranks == 0 else 15, ranks)], count)
    step = simulate(lanes, 2, COSTS, NETWORK)
    work = np.zeros(ranks)
    serial = 7.0
    for lane in lanes:
        traffic = lane.layers[0]
        attention = 10 + lane.tokens_R
        served = 5 * traffic.distinct_R + 2 * traffic.served_R
        work += 2 * (attention + served)
        out_RR = traffic.rows_RR.astype(np.float64) * 100
        back_RR = traffic.slots_RR.T.astype(np.float64) * 200
        exchanges = [NETWORK.exchange(np.zeros(ranks), sent).max() for sent in (out_RR, back_RR)]
        serial += 2 * float(attention.max() + served.max() + sum(exchanges))
    assert work.max() + 7.0 <= step.seconds + 1e-9
    assert step.seconds <= serial + 1e-9
    assert 0 <= step.idle < 1


def test_published_latencies_of_deep_ep_are_met() -> None:
    found = deep_ep()
    assert found["mean_error"] <= 0.05
    assert abs(found["worst_error"]) <= 0.12
    # What was fitted is what the hardware has: 400 Gb/s cards, NVLink of about 160 GB/s.
    assert found["fitted"]["far_gb_s"] == pytest.approx(50, rel=0.1)
    assert found["fitted"]["near_gb_s"] == pytest.approx(160, rel=0.15)


def test_copies_shorten_steps_at_many_ranks() -> None:
    routed = Routed("drawn", 64, [drawn(64 * 96 * 2, 64, 8, 0.6, 0)])
    points = scale(routed, 32, Network(8, 160e9, 50e9, 37e-6), fixed=0.3)
    in_order, copied = (next(p for p in points if p["placement"] == n) for n in PLACED)
    assert copied["imbalance"] < 1.1 < in_order["imbalance"]
    assert copied["step_ms"] < in_order["step_ms"]


PLACED = ("in order", "25 % copies")


def test_runs_here_are_predicted_from_two_of_them() -> None:
    point = {"ranks": 2, "tokens_per_s": 50.0, "bytes_out_a_token": 1.0, "bytes_back_a_token": 2.0}
    model = {"layers": 2, "experts": 8, "top_k": 2, "hidden": 64, "expert_bytes": 1000}
    model["trunk_bytes"] = 4000
    points = [
        {"name": "1 rank", "ranks": 1, "tokens_per_s": 100.0},
        {"name": "4 ranks", **point, "ranks": 4},
        {"name": "2 ranks", **point},
        {"name": "2 ranks, summed", **point},
        {"name": "2 ranks, 25 % of experts each", **point},
        {"name": "4 ranks, summed", "ranks": 4, "error": "ended"},
    ]
    dispatch_s = {"2 ranks": 1e-3, "2 ranks, summed": 3e-3, "4 ranks": 2e-3, "4 ranks, summed": 0.0}
    result = {"model": model, "job": {"batch": 4}, "points": points, "dispatch_s": dispatch_s}
    two, summed, four = against(result | {"environment": {"cores": 2}})
    names = [run["name"] for run in (two, summed, four)]
    assert names == ["2 ranks", "2 ranks, summed", "4 ranks"]
    assert [run["fitted"] for run in (two, summed, four)] == [True, False, False]
    assert two["predicted"] == pytest.approx(50.0)
    assert two["error"] == pytest.approx(0.0)
    # Two layers of 2 ms more, and nothing else; four ranks take turns on the two cores.
    assert 4 / summed["predicted"] - 4 / two["predicted"] == pytest.approx(2 * 2e-3)
    assert four["predicted"] < two["predicted"]
    assert two["predicted_kb"] > summed["predicted_kb"] > 0
    assert two["measured_kb"] == 0.003


@pytest.mark.parametrize("combine", ["exact", "summed"])
def test_exchanging_rows_takes_some_of_a_processor(combine: CombineMode) -> None:
    model = {"experts": 8, "top_k": 2, "hidden": 16}
    assert 0 < dispatch_seconds(model, ranks=2, batch=5, combine=combine) < float("inf")
