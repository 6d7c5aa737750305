"""Predictors: which experts the next MoE layers will need.

- `Forecast` (`forecast`): experts of later layers with a probability and a deadline.
- `Predictor` (`forecast`): follows one step of the model and makes forecasts when asked.
- `GivenForecast` (`forecast`): a predictor that repeats what a caller knows, as drafts do.
- `EvidenceSource` (`ensemble`): one way to guess; a number for each expert, not yet a probability.
  There are three: `TokenTable`, `PathEvidence` and `Lookahead`.
- `Ensemble` (`ensemble`): the predictor that weighs sources by logistic regression.
- `CalibratedPredictors` (`calibrated`): all sources and weights that `moe calibrate` fits to a
  model; `PREDICTORS` lists which sources each predictor uses.
"""

from routing.predict.forecast import (
    NO_TOKEN,
    Forecast,
    GivenForecast,
    Predictor,
    contexts,
    pad_contexts,
)

__all__ = ["NO_TOKEN", "Forecast", "GivenForecast", "Predictor", "contexts", "pad_contexts"]
