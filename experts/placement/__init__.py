"""Where experts live when several ranks share them: pure functions on observed loads."""

from experts.placement.eplb import eplb
from experts.placement.moves import fewest_moves, moved_bytes
from experts.placement.packing import pack
from experts.placement.placement import Placement, PlacementError, imbalance, linear, step_costs

__all__ = [
    "Placement",
    "PlacementError",
    "eplb",
    "fewest_moves",
    "imbalance",
    "linear",
    "moved_bytes",
    "pack",
    "step_costs",
]
