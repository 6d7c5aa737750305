"""Placements: which ranks hold which experts, from observed loads.

A placement decides which rank is asked for an expert; no result depends on it.

- `Placement`: experts of one layer in the slots of ranks, some of them as several copies.
- `first_placement`: the one to start with; `linear` and `eplb` are alternatives to our packing.
- `pack`, `repack`: placements for even loads (`packing`), by a search (`search`) that knows how
  even a placement is (`evenness`); `repack` counts what a move costs.
- `Rebalancer`: forecasts loads and has layers repacked between steps (`rebalance`), in another
  process (`background`).
- `without_ranks`: the placement after ranks were lost.
"""

from experts.placement.packing import first_placement, pack, repack, slots_for, without_ranks
from experts.placement.placement import (
    Placement,
    PlacementError,
    eplb,
    fewest_moves,
    linear,
    step_costs,
)

__all__ = [
    "Placement",
    "PlacementError",
    "eplb",
    "fewest_moves",
    "first_placement",
    "linear",
    "pack",
    "repack",
    "slots_for",
    "step_costs",
    "without_ranks",
]
