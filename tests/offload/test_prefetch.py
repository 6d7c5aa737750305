"""Prefetching against a simulated disk and clock: what it gains, and what it can cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from routing.predict import Forecast, GivenForecast
from tests.offload.simulated_disk import LOAD_S, Run
from tests.offload.traces import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Guess,
    Trace,
    cyclic,
    inverted,
    knowing,
    uniform,
    zipf,
)


def gain(
    trace: Trace, guess: Guess, policy: str = "lru", layer_s: float = 0.004
) -> tuple[float, Run]:
    """How much faster prefetching makes it; 1 for nothing gained or lost."""
    run = Run(trace, guess, policy, layer_s)
    return Run(trace, None, policy, layer_s).total / run.total, run


@pytest.mark.parametrize(("layer_s", "least"), [(0.002, 1.08), (0.004, 1.15), (0.016, 1.1)])
def test_a_good_predictor_gains(layer_s: float, least: float) -> None:
    trace = zipf(150)
    faster, run = gain(trace, knowing(trace), layer_s=layer_s)
    assert faster > least
    assert run.prefetcher is not None
    assert run.prefetcher.depth > 0
    for record in run.prefetcher.records:
        assert record.placed == record.useful + record.wasted + record.cancelled
        assert record.precision == 1
        assert record.saved_seconds >= record.lost_seconds
    assert sum(record.useful for record in run.prefetcher.records) > 100


@pytest.mark.parametrize(("layer_s", "then_s"), [(0.001, 0.016), (0.002, 0.004), (0.016, 0.001)])
def test_it_looks_as_far_ahead_as_a_load_takes(layer_s: float, then_s: float) -> None:
    """And no further, also when layers take another time than they did."""
    trace, asked = zipf(240), [0] * 240
    guess = knowing(trace)
    forecast = guess.forecast

    def spy(layer: int, depth: int) -> Forecast:
        asked[guess.step] = max(asked[guess.step], depth)
        return forecast(layer, depth)

    guess.forecast = spy  # type: ignore[method-assign, assignment]
    run = Run(trace[:120], guess, layer_s=layer_s)
    run.layer_s = then_s
    for step, layers in enumerate(trace[120:], 120):
        guess.at(step)
        run._step(layers)
    for seconds, last in ((layer_s, 120), (then_s, 240)):
        loads = math.ceil(LOAD_S / seconds)  # a load that waits for others takes a little longer
        assert set(asked[last - 40 : last]) <= set(range(loads, loads + (3 if loads > 1 else 1)))


def test_what_a_load_takes_is_followed() -> None:
    trace = uniform(80)
    run = Run(trace[:0], Guess(lambda step, layer: []))
    assert run.prefetcher is not None
    run.prefetcher.load_seconds = 10 * LOAD_S
    for layers in trace:
        run._step(layers)
    assert run.prefetcher.load_seconds == pytest.approx(LOAD_S, rel=0.3)


@pytest.mark.parametrize("trace", [zipf(120), uniform(120), cyclic(120)], ids=["z", "u", "c"])
@pytest.mark.parametrize("policy", ["lru", "forecast"])
def test_a_bad_predictor_costs_next_to_nothing(trace: Trace, policy: str) -> None:
    least = Run(trace, None, policy, layer_s=0.002).total
    for guess in (knowing(trace, 0.0), inverted(trace), Guess(lambda step, layer: [])):
        run = Run(trace, guess, policy, layer_s=0.002)
        assert run.total < 1.02 * least
        assert run.prefetcher is not None
        assert run.prefetcher.depth == 0
        assert guess.forecasts < 120 * LAYERS / 3  # hardly asked any more


@pytest.mark.parametrize("right", [0.2, 0.4, 0.6])
def test_a_mediocre_predictor_that_is_sure_of_itself_costs_next_to_nothing(right: float) -> None:
    for trace in (zipf(150), uniform(150)):
        assert gain(trace, knowing(trace, right), layer_s=0.002)[0] > 0.98


@pytest.mark.parametrize("policy", ["lru", "forecast"])
def test_a_predictor_that_turns_bad_is_turned_off(policy: str) -> None:
    trace = zipf(240)
    run = Run(trace, knowing(trace, until=80), policy)
    before = Run(trace, None, policy)
    assert sum(run.seconds[:80]) < 0.95 * sum(before.seconds[:80])
    assert sum(run.seconds[80:]) < 1.02 * sum(before.seconds[80:])
    at_first = Run(trace[:80], knowing(trace), policy).cache.statistics.total.prefetches
    assert run.cache.statistics.total.prefetches < 1.4 * at_first


def test_a_predictor_that_turns_good_is_found_out() -> None:
    trace = zipf(240)
    good, bad = knowing(trace), inverted(trace)
    run = Run(trace, Guess(lambda s, layer: (good if s >= 80 else bad).say(s, layer)))
    assert run.prefetcher is not None
    assert run.prefetcher.depth == 1
    assert sum(run.seconds[160:]) < 0.95 * sum(Run(trace, None).seconds[160:])


def test_what_the_router_contradicts_is_taken_back() -> None:
    """A right guess and a wrong one for the same layer; the wrong one has not begun."""
    trace = uniform(40)
    run = Run(trace, knowing(trace))
    prefetcher, cache = run.prefetcher, run.cache
    assert prefetcher is not None
    assert prefetcher.gates[0].on
    absent = [e for e in range(EXPERTS) if not cache.resident(0)[e]][:2]
    prefetcher.predictor = Guess(
        lambda step, layer: list(zip(absent, (0.96, 0.94), strict=True)) * (layer == 0)
    )
    prefetcher.layer_seconds = 1.0  # time enough for both
    before, reads = prefetcher.records[0].cancelled, run.disk.reads
    prefetcher.start([[0]])
    run.visit(0, [absent[0]])
    run.clock.now += 1
    assert cache.resident(0)[absent[0]] == 1
    assert cache.resident(0)[absent[1]] == 0
    assert run.disk.reads == reads + 1
    assert prefetcher.records[0].cancelled == before + 1


def foretold(experts: list[int], layer: int) -> Forecast:
    return Forecast.of_rows(-1, {layer: np.eye(EXPERTS)[experts].max(0, keepdims=True)}, 0.5)


def trusting() -> Run:
    """All layers bid, and there is time before a step for three reads."""
    trace = zipf(60)
    run = Run(trace, knowing(trace))
    assert run.prefetcher is not None
    assert all(gate.on for gate in run.prefetcher.gates)
    run.prefetcher.layer_seconds = 3 * LOAD_S / LAYERS
    return run


def test_what_is_foretold_is_read_before_its_step_begins() -> None:
    run = trusting()
    prefetcher, cache = run.prefetcher, run.cache
    assert prefetcher is not None
    prefetcher.predictor = GivenForecast()
    layer = LAYERS - 1
    absent = [e for e in range(EXPERTS) if not cache.resident(layer)[e]][:3]
    before = prefetcher.records[layer].placed
    prefetcher.bid_early(foretold(absent[:1], layer))
    prefetcher.bid_early(foretold(absent, layer))  # again, and more: one bid for each
    assert prefetcher.records[layer].placed == before + 3
    run.clock.now += 4 * LOAD_S
    prefetcher.start([[0]])  # nothing is told: it follows its bids
    useful, wasted = prefetcher.records[layer].useful, prefetcher.records[layer].wasted
    run.visit(layer, absent[:2])
    assert all(cache.has(layer, expert) for expert in absent)
    assert prefetcher.records[layer].useful == useful + 2
    assert prefetcher.records[layer].wasted == wasted + 1
    prefetcher.start([[0]])
    run.visit(layer, absent[:2])  # it sleeps: nothing was foretold
    assert prefetcher.records[layer].useful == useful + 2


def test_what_was_foretold_of_a_draft_that_is_thrown_away_is_taken_back() -> None:
    run = trusting()
    prefetcher, cache = run.prefetcher, run.cache
    assert prefetcher is not None
    absent = [e for e in range(EXPERTS) if not cache.resident(0)[e]][:3]
    record = prefetcher.records[0]
    placed, cancelled, reads = record.placed, record.cancelled, run.disk.reads
    prefetcher.bid_early(foretold(absent, 0))
    assert record.placed == placed + 3
    prefetcher.predictor = GivenForecast()
    prefetcher.start([[0]])
    run.visit(0, [])
    assert record.cancelled == cancelled + 2  # one had begun
    run.clock.now += 9 * LOAD_S
    cache.poll()
    assert run.disk.reads == reads + 1
    assert record.placed == record.useful + record.wasted + record.cancelled


def test_the_cost_of_forecasting_counts() -> None:
    """Right, but it takes longer to say so than is saved."""
    trace = zipf(100)
    guess = knowing(trace)
    run = Run(trace[:0], guess)
    say = guess.say

    def slow(step: int, layer: int) -> Sequence[tuple[int, float]]:
        run.clock.now += 2 * TOP_K * LOAD_S
        return say(step, layer)

    guess.say = slow
    for step, layers in enumerate(trace):
        guess.at(step)
        run._step(layers)
    assert run.cache.statistics.total.prefetches == 0
    assert guess.forecasts < 100 * LAYERS / 4
