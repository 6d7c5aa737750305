"""Tiers: places of experts between a model and its disk, each a cache of the next one.

In main memory there is one. A GPU has two: its own slots, filled from host memory, filled from
disk. Host memory keeps what the disk would have to bring again: all that the GPU has not, and of
what it has the less valuable half, which it will drop first. A copy of what is safe there would be
of no use; a copy back of everything dropped would take as many transfers as bringing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload.cache import ExpertCache
from offload.policies import Policy, Values
from offload.statistics import LayerStatistics

MEMORY, HOST = "memory", "host"
CAUSES = ("demand", "streamed", "useful", "wasted", "restored")


@dataclass(frozen=True)
class Tier:
    """A place of experts.

    Attributes:
        name: of the memory: ``memory``, a device, or ``host``.
        cache: who is there.
    """

    name: str
    cache: ExpertCache

    def statistics(self) -> dict[str, object]:
        """What it did and holds, for JSON; ``bytes_in`` came from the next tier, or from disk."""
        total = self.cache.statistics.total
        return {
            "name": self.name,
            "slots": self.cache.slots,
            "hits": total.hits,
            "misses": total.misses,
            "hit_ratio": total.hit_ratio,
            "evictions": total.evictions,
            "stall_seconds": total.stall_seconds,
            "bytes_in": bytes_in(total),
        }


def bytes_in(counters: LayerStatistics) -> int:
    """All that was brought, whyever."""
    return sum(getattr(counters, f"{cause}_bytes") for cause in CAUSES)


class HostValues:
    """What units are worth in host memory, by the policy of the GPU they are for, which learns for
    both. See `offload.policies.Policy`.

    Attributes:
        device: the cache that they are for, as soon as there is one.
    """

    name = HOST

    def __init__(self, policy: Policy) -> None:
        self.device: ExpertCache | None = None
        self._policy = policy

    def touch(self, layer: int, units: Sequence[int]) -> None:
        pass

    def values(self) -> Values:
        """As on the device; below all others, the safest first, what is safe there."""
        values = self._policy.values()
        near = None if self.device is None else np.flatnonzero(self.device.present)
        if near is None or not len(near):
            return values
        values = values.copy()
        safe = near[values[near] > np.median(values[near])]
        values[safe] = values.min() - values[safe]
        return values

    def bid(self, unit: int, probability: float) -> float:
        return self._policy.bid(unit, probability)
