"""Predictors: which experts the layers to come will need, all said as one `Forecast`."""

from routing.predict.forecast import (
    NO_TOKEN,
    Forecast,
    GivenForecast,
    Predictor,
    contexts,
    pad_contexts,
)

__all__ = ["NO_TOKEN", "Forecast", "GivenForecast", "Predictor", "contexts", "pad_contexts"]
