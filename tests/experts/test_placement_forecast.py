"""Forecasts of loads: those of the last steps again, and those that waiting prompts predict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.placement import Floats
from experts.placement.rebalance import LOAD_WINDOW, LoadForecast, TokenLoads

SKEWED = np.array([40, 40, 40, 40, 1, 1, 1, 1])


def test_steady_loads_are_forecast_as_they_were() -> None:
    forecast = LoadForecast([8])
    for _ in range(LOAD_WINDOW + 9):
        forecast.observe(SKEWED[None])
    np.testing.assert_allclose(forecast.steps_SE(0), np.tile(SKEWED * 1.0, (LOAD_WINDOW, 1)))


def random_steps(rng: np.random.Generator, steps: int) -> Floats:
    return rng.uniform(1.0, 20.0, (steps, 8))


@given(st.integers(0, 2**32), st.integers(1, LOAD_WINDOW + 9), st.integers(1, 30))
def test_a_table_that_was_right_up_to_a_factor_an_expert_is_believed_with_it(
    seed: int, steps: int, coming: int
) -> None:
    rng = np.random.default_rng(seed)
    factor_E = rng.uniform(0.9, 1.1, 8)
    past_SE, coming_SE = random_steps(rng, steps), random_steps(rng, coming)
    forecast = LoadForecast([8])
    for expected_E in past_SE:
        forecast.observe(np.rint(1e4 * expected_E * factor_E).astype(np.int64)[None])
    kept = min(steps, LOAD_WINDOW)
    found_SE = forecast.steps_SE(0, TokenLoads(1e4 * past_SE, 1e4 * coming_SE), ahead=coming)
    assert found_SE.shape == (kept, 8)
    wanted_SE = 1e4 * (coming_SE * factor_E)[np.arange(kept) * coming // kept]
    # Some steps' worth of doubt draws the factors towards 1, by which the table is off, too.
    np.testing.assert_allclose(found_SE, wanted_SE, rtol=0.4, atol=2e4)
    if steps >= LOAD_WINDOW:
        off = np.abs(found_SE - wanted_SE).sum()
        unbent_SE = 1e4 * coming_SE[np.arange(kept) * coming // kept]
        assert off < np.abs(unbent_SE - wanted_SE).sum()


@given(st.integers(0, 2**32), st.integers(1, LOAD_WINDOW))
def test_loads_that_are_known_come_first_and_then_those_of_before(seed: int, coming: int) -> None:
    rng = np.random.default_rng(seed)
    forecast, past_SE = LoadForecast([8]), random_steps(rng, LOAD_WINDOW)
    for expected_E in past_SE:
        forecast.observe(np.rint(expected_E).astype(np.int64)[None])
    tokens = TokenLoads(past_SE, random_steps(rng, coming))
    found_SE = forecast.steps_SE(0, tokens, ahead=LOAD_WINDOW)
    assert (found_SE >= 0).all()
    np.testing.assert_array_equal(found_SE[coming:], forecast.steps_SE(0)[coming:])
    soon_SE = forecast.steps_SE(0, tokens, ahead=coming)
    np.testing.assert_array_equal(soon_SE[0], found_SE[0])
    assert np.array_equal(forecast.steps_SE(0, tokens, ahead=1e9)[1:], forecast.steps_SE(0)[1:])


def test_what_a_table_did_not_know_of_the_last_steps_is_not_known_of_the_next() -> None:
    """Steps that scatter about what was expected: placements are judged by such, not by means."""
    rng = np.random.default_rng(0)
    expected_SE, forecast = np.full((LOAD_WINDOW, 8), 100.0), LoadForecast([8])
    for expected_E in expected_SE:
        forecast.observe(rng.poisson(expected_E)[None])
    found_SE = forecast.steps_SE(0, TokenLoads(expected_SE, np.full((3, 8), 100.0)))[:3]
    same_SE = forecast.steps_SE(0, TokenLoads(expected_SE, np.full((LOAD_WINDOW, 8), 100.0)))
    larger_SE = forecast.steps_SE(0, TokenLoads(expected_SE, np.full((LOAD_WINDOW, 8), 400.0)))
    np.testing.assert_array_equal(found_SE, same_SE[:3])
    assert 8.0 < same_SE.std() < 12.0
    assert larger_SE.std() == pytest.approx(2 * same_SE.std(), rel=0.05)


def test_without_a_step_to_hold_a_table_against_it_is_not_believed() -> None:
    forecast = LoadForecast([8])
    forecast.observe(SKEWED[None])
    tokens = TokenLoads(np.zeros((0, 8)), np.ones((4, 8)))
    np.testing.assert_allclose(forecast.steps_SE(0, tokens), SKEWED[None])


def test_an_expert_that_the_window_lacks_may_still_be_expected() -> None:
    forecast = LoadForecast([2])
    for _ in range(4):
        forecast.observe(np.array([10, 0])[None])
    tokens = TokenLoads(np.array([[10.0, 0.0]] * 4), np.array([[0.0, 10.0]]))
    assert forecast.steps_SE(0, tokens)[0].argmax() == 1


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_layers_that_are_counted_together_are_forecast_as_each_alone(seed: int) -> None:
    """Of different numbers of experts, and in steps that leave some of them out."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, 3).tolist()
    together, alone = LoadForecast(sizes), [LoadForecast([size]) for size in sizes]
    for _ in range(LOAD_WINDOW + 5):
        tokens_LE = np.zeros((3, max(sizes)), np.int64)
        for layer, size in enumerate(sizes):
            tokens_LE[layer, :size] = rng.integers(0, 9, size) * rng.integers(0, 2)
        together.observe(tokens_LE)
        for layer, size in enumerate(sizes):
            alone[layer].observe(tokens_LE[layer : layer + 1, :size])
    for layer, one in enumerate(alone):
        assert together.steps_L[layer] == one.steps_L[0]
        np.testing.assert_allclose(together.steps_SE(layer), one.steps_SE(0))
