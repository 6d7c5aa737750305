"""Compression: how many bits each expert keeps, and codes that lose little at those bits.

- `LayerInputs`, `LayerCalibration` (`statistics`): what `moe calibrate --compress` found out.
- `predicted_damage` and `allocate` (`allocation`): the loss that each width is predicted to cause,
  and the best choice of widths within a budget of bytes.
- `quantize_calibrated` (`gptq`): planes of a layer's experts, compensated on calibration inputs.
"""
