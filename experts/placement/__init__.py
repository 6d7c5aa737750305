"""Where experts live when several ranks share them: pure functions on observed loads.

`rebalance` applies them between steps, to loads that are forecast.
"""

from experts.placement.packing import first_placement, pack, repack, slots_for, without_ranks
from experts.placement.placement import (
    Placement,
    PlacementError,
    eplb,
    fewest_moves,
    imbalance,
    linear,
    step_costs,
)

__all__ = [
    "Placement",
    "PlacementError",
    "eplb",
    "fewest_moves",
    "first_placement",
    "imbalance",
    "linear",
    "pack",
    "repack",
    "slots_for",
    "step_costs",
    "without_ranks",
]
