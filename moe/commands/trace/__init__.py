"""``moe trace``: measure a model's routing on a text.

The measurements are those of OpenMoE, and those that caches, expert sharing and prediction depend
on. They are made on a trace (`moe.calibration.trace`), for any model that loads.
"""
