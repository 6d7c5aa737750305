"""Practical Belady: evict what is expected to be used last, going by what has predicted well.

Two voices say how likely a unit's next use is: the usual rates, and which experts have followed
which (`offload.policies.succession`). Each is scored on what then happens, by its log loss; the
better one is listened to. With nothing to go by it is frequency_recency. Predictors
(`routing.predict`) are not asked: they know the next layers, and what goes is not asked for in
them anyway.
"""

from __future__ import annotations

from offload.policies.frequency_recency import FrequencyRecency


class ForecastPolicy(FrequencyRecency):
    """See the module."""

    name = "forecast"
    _habits = True
