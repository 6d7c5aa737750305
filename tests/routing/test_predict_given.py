"""What is told is said again, from wherever it is asked for."""

from __future__ import annotations

import numpy as np

from routing.predict import Forecast, GivenForecast

EXPERTS = [4, 4, 4]


def told() -> Forecast:
    guesses = {layer: np.array([[0.0, 0.9, 0.2 * layer, 0.0]]) for layer in range(3)}
    return Forecast.of_rows(-1, guesses, at_least=0.1)


def test_layers_ahead_and_no_others() -> None:
    predictor = GivenForecast(told())
    for layer in (-1, 0, 1, 2):
        for depth in (1, 2, None):
            said = predictor.forecast(layer, depth).validate(EXPERTS)
            last = 2 if depth is None else min(2, layer + depth)
            assert sorted(set(said.layer.tolist())) == list(range(layer + 1, last + 1))
            assert (said.deadline == said.layer - layer).all()
    assert not predictor.silent


def test_nothing_told_is_silence() -> None:
    assert GivenForecast().silent
    assert len(GivenForecast().forecast(-1)) == 0
