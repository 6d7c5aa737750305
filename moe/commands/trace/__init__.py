"""``moe trace``: what a model's routing looks like on a text.

The questions are those of OpenMoE and of what lives on locality: caches, shared
experts, prediction. Measured on a trace (`moe.calibration.trace`), for any model that loads.
"""
