"""A forecast is what the rows' probabilities say, in one order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing.predict import NO_TOKEN, Forecast, contexts, pad_contexts
from routing.routing import RoutingError

PROBABILITY = st.floats(0, 1, width=32)


@given(st.data())
def test_a_forecast_of_rows_is_sorted_and_right(data: st.DataObject) -> None:
    rows, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    layer = data.draw(st.integers(-1, 3))
    targets = data.draw(st.sets(st.integers(layer + 1, layer + 4)))
    at_least = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    guesses = {
        target: np.array(
            [[data.draw(PROBABILITY) for _ in range(experts)] for _ in range(rows)], np.float32
        )
        for target in targets
    }
    forecast = Forecast.of_rows(layer, guesses, at_least).validate([experts] * 10)
    said = {
        (int(at), int(e)): float(p)
        for at, e, p in zip(forecast.layer, forecast.expert, forecast.probability, strict=True)
    }
    assert len(said) == len(forecast)
    assert torch.equal(forecast.deadline, forecast.layer - layer)
    for target, guess in guesses.items():
        for expert in range(experts):
            alone = 1 - np.prod(1 - guess[:, expert])
            if alone > at_least + 1e-6:
                assert said[target, expert] == pytest.approx(float(alone), abs=1e-6)
            elif alone < at_least - 1e-6:
                assert (target, expert) not in said


def test_nothing_said_is_an_empty_forecast() -> None:
    assert len(Forecast.empty().validate([4])) == 0
    assert len(Forecast.of_rows(0, {})) == 0


def _forecast(layer: list[int], expert: list[int], probability: list[float]) -> Forecast:
    layers = torch.tensor(layer)
    return Forecast(layers, torch.tensor(expert), torch.tensor(probability), layers + 1)


@pytest.mark.parametrize(
    ("forecast", "message"),
    [
        (_forecast([2], [0], [0.5]), r"layers must be in \[0, 2\)"),
        (_forecast([0], [4], [0.5]), "expert ids must be in"),
        (_forecast([0], [0], [1.5]), r"probabilities must be in \[0, 1\]"),
        (_forecast([0, 0], [0, 1], [0.5, 0.6]), "sorted by deadline, then by probability"),
        (_forecast([1, 0], [0, 1], [0.6, 0.5]), "sorted by deadline"),
        (_forecast([1, 0], [0], [0.6]), "must all be"),
    ],
)
def test_what_no_forecast_may_be(forecast: Forecast, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        forecast.validate([4, 4])


def test_contexts_are_the_last_tokens() -> None:
    wanted = [[NO_TOKEN, NO_TOKEN, 5], [NO_TOKEN, 5, 6], [5, 6, 7], [6, 7, 8]]
    assert contexts(torch.tensor([5, 6, 7, 8]), 3).tolist() == wanted
    assert pad_contexts([[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]], 3).tolist() == wanted
