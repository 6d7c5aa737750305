"""Files that `moe calibrate` leaves beside a model, and their use in the engine.

- `Trace` (`trace`): which experts each token of the calibration text used.
- `SampledRows` (`trace`): what the experts read for a sample of these tokens; never saved.
- `CalibrationManifest` (`files`): ``calibration.json``, which model the files belong to.
- `FittedPredictors` (`files`): what `save_calibration` writes and `load_calibration` reads.

`moe.commands.calibrate` makes calibrations; `routing.predict` has the predictors themselves.
"""
