"""The size of the block that each program computes, measured on the GPU for each shape.

This happens outside the kernels, as Triton's own autotuner fails in its interpreter. The first
decode tile is the reference: another tile is taken only if it gives the same bits on the call at
hand, because matrix instructions of different sizes may round differently, and a row's bits must
not depend on the number of other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.triton.language import INTERPRETED

# Slots of an expert from which on taller tiles pay.
_MANY_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """Slots and outputs of one program, its warps, and its loads in flight."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3

    @property
    def options(self) -> dict[str, int | bool]:
        """What every launch with this tile passes to Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# The first one fits the shared memory of any GPU, at any dtype.
DECODE = (
    Tile(16, 64, stages=2),
    Tile(16, 64),
    Tile(16, 64, stages=5),
    Tile(16, 32, warps=2),
    Tile(16, 128),
)
PREFILL = (Tile(64, 64), Tile(64, 128), Tile(128, 64), Tile(128, 128, warps=8))

_chosen: dict[tuple[Hashable, bool], Tile] = {}


def choose(key: Hashable, rows_per_expert: float, run: Callable[[Tile], Tensor]) -> Tile:
    """The tile for a call of this shape; measures where there is a GPU and no graph is captured.

    Args:
        key: device, shapes and dtypes of the layer.
        rows_per_expert: slots divided by experts.
        run: computes the call at hand with a tile.
    """
    many = rows_per_expert >= _MANY_ROWS
    candidates = PREFILL if many else DECODE
    if (key, many) not in _chosen:
        if INTERPRETED:
            return candidates[0]
        if torch.cuda.is_current_stream_capturing():
            return DECODE[0]
        _chosen[key, many] = fastest(candidates, run, _milliseconds)
    return _chosen[key, many]


def fastest(
    candidates: Sequence[Tile],
    run: Callable[[Tile], Tensor],
    measure: Callable[[Callable[[], Tensor]], float],
) -> Tile:
    """The fastest of the candidates whose result has the bits of the first decode tile's."""
    expected = run(DECODE[0])
    times: dict[Tile, float] = {}
    for tile in dict.fromkeys((DECODE[0], *candidates)):
        try:
            if torch.equal(run(tile), expected):
                times[tile] = measure(partial(run, tile))
        except OutOfResources:  # needs more shared memory than this GPU has
            continue
    return min(times, key=lambda tile: times[tile], default=DECODE[0])


def _milliseconds(function: Callable[[], Tensor]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=5, rep=20, return_mode="median"))
