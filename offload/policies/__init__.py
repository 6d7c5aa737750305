"""Eviction policies: which experts are worth keeping in a cache.

An `EvictionPolicy` sees what each layer requests, but not what the cache holds, and values units
(a unit is one expert of one layer); the cache evicts the least valuable. `make_policy` makes the
policy with a given name in the profile: `LRU`, `LFU`, `FrequencyRecency` or `ForecastPolicy`.
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
"""Name in a profile -> constructor, of the number of layers and the largest E."""

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
    """The policy of this name; LRU instead of a learned one if the compiled kernels do not build.

    Args:
        name: of `POLICIES`.
        num_layers: L.
        width: largest E of any layer.
    """
    make = POLICIES[name]
    if isinstance(make, type) and issubclass(make, FrequencyRecency) and choose_kernel()[0] is None:
        make = LRU
    return make(num_layers, width)
