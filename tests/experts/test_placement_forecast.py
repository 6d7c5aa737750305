"""Forecasts of loads: steady ones stay, drifts are carried on, prompts that wait count."""

from __future__ import annotations

import numpy as np
import pytest

from experts.placement.forecast import WINDOW, LoadForecast
from experts.placement.placement import Ints

SKEWED = np.array([40, 40, 40, 40, 1, 1, 1, 1])


def test_steady_loads_are_forecast_as_they_were() -> None:
    forecast = LoadForecast(8)
    for _ in range(WINDOW + 9):
        forecast.observe(SKEWED)
    np.testing.assert_allclose(forecast.steps_SE(), np.tile(SKEWED * 1.0, (WINDOW, 1)))


def test_a_drift_is_carried_on_better_than_by_the_window() -> None:
    rng = np.random.default_rng(0)
    forecast, wrong, by_window = LoadForecast(8), 0.0, 0.0
    seen: list[Ints] = []
    for step in range(200):
        share_E = 1.5 + np.sin(step / 40 + np.arange(8))
        tokens_E = rng.multinomial(4000, share_E / share_E.sum())
        if step > 60:
            wrong += np.abs(forecast.share_E() - share_E / share_E.sum()).sum()
            window_E = np.sum(seen[-WINDOW:], axis=0)
            by_window += np.abs(window_E / window_E.sum() - share_E / share_E.sum()).sum()
        forecast.observe(tokens_E)
        seen.append(tokens_E)
    assert wrong < by_window / 3


def test_prompts_that_wait_bend_the_forecast_before_they_run() -> None:
    forecast = LoadForecast(8)
    for _ in range(WINDOW):
        forecast.observe(SKEWED)
    arriving_E = np.zeros(8)
    arriving_E[7] = 10.0 * SKEWED.sum() * WINDOW
    assert forecast.share_E(arriving_E).argmax() == 7
    assert forecast.share_E(arriving_E).sum() == pytest.approx(1.0)
    assert forecast.steps_SE(arriving_E)[:, 7].mean() > 2 * SKEWED[7]


def test_an_expert_that_the_window_lacks_may_still_be_expected() -> None:
    forecast = LoadForecast(2)
    forecast.observe(np.array([10, 0]))
    assert forecast.steps_SE(np.array([0.0, 10.0]))[0].tolist() == [5.0, 5.0]
