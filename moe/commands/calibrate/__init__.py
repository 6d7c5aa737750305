"""``moe calibrate``: record where a model routes a text, and learn from it.

- `calibrate` (`calibrate`): the command; `calibrate_model` is the same from Python.
- `record_trace` (`record`): reads windows of text into a `moe.calibration.trace.Trace`.
- `fit_predictors` (`fit`): from a trace to `moe.calibration.files.FittedPredictors`.
- `analyse` (`compression`): with ``--compression``, what each layer loses at fewer bits, for
  ``moe convert``.
"""
