"""The default eviction policy: evict what is expected to be used last (practical Belady).

Two estimates learn while the model runs how likely a unit's next use is: rates that forget
(`offload.policies.rates`), and which experts have followed which (`offload.policies.succession`).
Each is scored by its log loss on what then happens; the better one is used. With nothing to
learn from it is `FrequencyRecency`. Predictors (`routing.predict`) are not asked: they know the
next layers, and no policy evicts what those ask for anyway.
"""

from __future__ import annotations

from offload.policies.frequency_recency import FrequencyRecency


class ForecastPolicy(FrequencyRecency):
    """See the module."""

    name = "forecast"
    _habits = True
