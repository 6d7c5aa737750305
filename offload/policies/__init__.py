"""Replacement policies: what is worth keeping.

A policy sees what is asked for and what is predicted, never where anything lives.
"""

from collections.abc import Callable

from offload.policies.base import Policy, Values
from offload.policies.classic import LFU, LRU
from offload.policies.forecast import ForecastPolicy
from offload.policies.frequency_recency import FrequencyRecency

POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "frequency_recency": FrequencyRecency,
    "forecast": ForecastPolicy,
}
"""Name in a profile -> policy for so many layers of at most so many experts."""

__all__ = ["LFU", "LRU", "POLICIES", "ForecastPolicy", "FrequencyRecency", "Policy", "Values"]
