"""Random placements; ranks that are threads are in `examples.models.loopback`."""

from __future__ import annotations

import numpy as np

from examples.models.loopback import ThreadExchange, on_ranks
from experts.placement import Placement

__all__ = ["ThreadExchange", "on_ranks", "random_placement"]


def random_placement(experts: int, ranks: int, extra: int, seed: int) -> Placement:
    """Every expert somewhere, and about `extra` copies in any places, also twice on a rank."""
    random = np.random.default_rng(seed)
    slots = -(-(experts + min(extra, experts * (ranks - 1))) // ranks) * ranks
    chosen = list(range(experts)) + random.integers(0, experts, slots - experts).tolist()
    return Placement(tuple(random.permutation(chosen).tolist()), experts, ranks)
