"""Eviction policies: what is worth keeping.

An `EvictionPolicy` sees what each layer asks for, never where anything lives, and values units
(an expert of a layer each); the cache evicts the least valuable. `make_policy` makes one by its
name in a profile.
"""

from collections.abc import Callable

from kernels.cpu import choose_kernel
from offload.policies.base import LFU, LRU, EvictionPolicy, Values
from offload.policies.learned import ForecastPolicy, FrequencyRecency

POLICIES: dict[str, Callable[[int, int], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "frequency_recency": FrequencyRecency,
    "forecast": ForecastPolicy,
}
"""Name in a profile -> policy for so many layers of at most so many experts."""

__all__ = [
    "LFU",
    "LRU",
    "POLICIES",
    "EvictionPolicy",
    "ForecastPolicy",
    "FrequencyRecency",
    "Values",
    "make_policy",
]


def make_policy(name: str, num_layers: int, width: int) -> EvictionPolicy:
    """The policy of this name; LRU for one that learns where the compiled kernels do not build.

    Args:
        name: of `POLICIES`.
        num_layers: L.
        width: most experts of a layer.
    """
    make = POLICIES[name]
    if isinstance(make, type) and issubclass(make, FrequencyRecency) and choose_kernel()[0] is None:
        make = LRU
    return make(num_layers, width)
