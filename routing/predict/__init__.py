"""Predictors: which experts the layers to come will need, all said as one `Forecast`."""

from routing.predict.forecast import NO_TOKEN, Forecast, Predictor, Told, contexts, padded

__all__ = ["NO_TOKEN", "Forecast", "Predictor", "Told", "contexts", "padded"]
