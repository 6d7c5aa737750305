"""The size of the block that each program computes, measured on the GPU for each shape.

This happens outside the kernels, as Triton's own autotuner fails in its interpreter. One projection
is timed by itself: routing runs operation by operation at first, which takes longer and varies
more. A tile is taken only if it gives the bits of a reference tile on the call at hand, because
matrix instructions of different sizes may round differently, and a row's bits must not depend on
the number of other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.triton.language import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """Slots and outputs of one program, its warps, its loads in flight, and how much of K each load
    of whole weights has."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3
    depth: int = 64

    @property
    def options(self) -> dict[str, int | bool]:
        """What every launch with this tile passes to Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class PlaneTile:
    """Slots of one program on bit planes, and how it reads them.

    Attributes:
        two: two blocks of 16 outputs, not one; a gated activation always has two.
        unroll: units that a warp reads at once.
        ahead: each unit is read before the one before it is multiplied.
        fetch: all that a block of outputs needs is first asked for, into the L2 cache.
    """

    rows: int
    two: bool = False
    unroll: int = 1
    ahead: bool = False
    fetch: bool = False

    def constants(self, parts: int) -> dict[str, int | bool]:
        """What the kernel is compiled for; parts of K have a warp each."""
        return {
            "ROWS": self.rows,
            "PARTS": parts,
            "UNROLL": self.unroll,
            "AHEAD": self.ahead,
            "FETCH": self.fetch,
        }

    def options(self, parts: int) -> dict[str, int | bool]:
        """See `Tile.options`."""
        return {"num_warps": parts, "num_stages": 1, "enable_fp_fusion": True}


@dataclass(frozen=True)
class TallTile:
    """Slots of one program on bit planes that decodes each weight once for all of them.

    Attributes:
        blocks: of 16 outputs.
        warps: each has some of the blocks.
        stages: units on their way at once.
        rounded: weights have the activations' dtype; else sums of scale groups are exact, and slow.
    """

    rows: int
    blocks: int = 4
    warps: int = 4
    stages: int = 3
    rounded: bool = False

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernel is compiled for."""
        return {
            "ROWS": self.rows,
            "BLOCKS": self.blocks,
            "STAGES": self.stages,
            "ROUNDED": self.rounded,
        }

    @property
    def options(self) -> dict[str, int | bool]:
        """See `Tile.options`."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# The first one fits the shared memory of any GPU, at any dtype. The others read 3.2 (one token) and
# 4.1 TB/s (eight) of an H200's 4.1.
DECODE = (
    Tile(16, 64, stages=2),
    Tile(16, 64, depth=128),
    Tile(16, 64, stages=4, depth=128),
    Tile(16, 32, warps=2, stages=4, depth=128),
    Tile(16, 32, stages=6),
)
PREFILL = (Tile(64, 64), Tile(64, 128), Tile(128, 64), Tile(128, 128, warps=8))
# Bit planes, of few rows and of more: all tiles give the same bits.
PLANES = (
    PlaneTile(8),
    PlaneTile(8, unroll=4),
    PlaneTile(8, unroll=3),
    PlaneTile(8, fetch=True),
    PlaneTile(8, unroll=2, fetch=True),
    PlaneTile(8, two=True, unroll=3, fetch=True),
    PlaneTile(16, two=True),
)
PREFILL_PLANES = (
    PlaneTile(16, two=True),
    PlaneTile(32, two=True),
    PlaneTile(64),
    PlaneTile(64, two=True),
)
TALL = (
    TallTile(64, rounded=True),
    TallTile(64, blocks=8, rounded=True),
    TallTile(64, blocks=8, warps=8, rounded=True),
    TallTile(32, rounded=True),
)

_chosen: dict[Hashable, Any] = {}
_Tile = TypeVar("_Tile", bound=Hashable)


def choose(
    key: Hashable,
    candidates: Sequence[_Tile],
    reference: _Tile,
    run: Callable[[_Tile], Callable[[], Tensor]],
    compared: Callable[[Tensor], Tensor],
) -> _Tile:
    """The tile for a call of this shape; measures where there is a GPU and no graph is captured.

    Args:
        key: device, shapes and dtypes of the projection, and how many rows there are about.
        candidates: to be measured; the first is taken where nothing can be.
        reference: a tile that always runs, whose bits all others must have.
        run: prepares a tile; what it returns computes the call at hand, and nothing else is timed.
        compared: what of the result has values.
    """
    if key not in _chosen:
        if INTERPRETED:
            return candidates[0]
        if torch.cuda.is_current_stream_capturing():
            return reference
        _chosen[key] = fastest(candidates, reference, run, compared, _milliseconds)
    chosen: _Tile = _chosen[key]
    return chosen


def fastest(
    candidates: Sequence[_Tile],
    reference: _Tile,
    run: Callable[[_Tile], Callable[[], Tensor]],
    compared: Callable[[Tensor], Tensor],
    measure: Callable[[Callable[[], Tensor]], float],
) -> _Tile:
    """The fastest of the candidates whose result has the bits of the reference's."""
    expected = compared(run(reference)())
    times: dict[_Tile, float] = {}
    for tile in dict.fromkeys((reference, *candidates)):
        try:
            call = run(tile)
            if torch.equal(compared(call()), expected):
                times[tile] = measure(call)
        except OutOfResources:  # needs more shared memory than this GPU has
            continue
    return min(times, key=lambda tile: times[tile], default=reference)


def _milliseconds(function: Callable[[], Tensor]) -> float:
    """Of a replay: what the host does to launch takes longer than most kernels, and varies."""
    from triton.testing import do_bench

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return float(do_bench(graph.replay, warmup=5, rep=20, return_mode="median"))
