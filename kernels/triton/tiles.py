"""The size of the block that each program computes, measured on the GPU for each shape.

This happens outside the kernels, as Triton's own autotuner fails in its interpreter. One projection
is timed by itself, on rows of its own: those at hand may be padding. A tile is taken only if it
gives the bits of a reference tile, because matrix instructions of different sizes may round
differently, and a row's bits must not depend on the number of other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.planes import CHUNK_COLUMNS, PlaneFormat
from kernels.scales import has_float_codes
from kernels.triton.language import INTERPRETED

UNIT_COLUMNS = 2 * CHUNK_COLUMNS
"""See kernels/triton/codes.py."""


@dataclass(frozen=True)
class Tile:
    """Slots and outputs of one program, its warps, its loads in flight, and how much of K each load
    of whole weights has. `halves`: a block of half as many slots or fewer takes half the time."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3
    depth: int = 64
    halves: bool = False

    def fits(self, parts: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        """Return whether registers hold the sums of so many parts: gate and up. Float32 has no
        matrix instructions: each thread holds whole rows and columns of what it multiplies."""
        most = 16 if dtype == torch.float32 else self.rows
        return self.rows <= most and parts * self.columns <= 256

    def depth_of(self, dtype: torch.dtype) -> int:
        """`depth`; in float32 one that registers hold."""
        return min(self.depth, 16) if dtype == torch.float32 else self.depth

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of a launch with this tile for Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class PlaneTile:
    """Slots of one program on bit planes, and how it reads them.

    Attributes:
        two: two blocks of 16 outputs, not one; a gated activation always has two.
        unroll: units that a warp reads at once.
        fetch: all that a block of outputs needs is first asked for, into the L2 cache.
    """

    rows: int
    two: bool = False
    unroll: int = 1
    fetch: bool = False

    def constants(self, parts: int) -> dict[str, int | bool]:
        """Return the constants that the kernel is compiled for; parts of K have a warp each."""
        return {
            "ROWS": self.rows,
            "PARTS": parts,
            "UNROLL": self.unroll,
            "FETCH": self.fetch,
        }

    def fits(self, codes: PlaneFormat, planes: int, dtype: torch.dtype) -> bool:
        """Return whether registers hold the sums and all that ptxas reads ahead.

        Float32, which has no matrix instructions, takes 8 rows. 64 rows are for codes of one piece
        whose activations are summed once a unit, or not at all.

        Args:
            planes: that are read; 0 if experts differ.
        """
        if dtype == torch.float32:
            return self.rows == 8 and self.unroll == 1
        if self.rows < 64 or has_float_codes(codes.scales):
            return True
        every = len(codes.plane_bits)
        pieces = codes.bits > 4 and (planes or every) >= every
        return not pieces and codes.group_size >= UNIT_COLUMNS

    def options(self, parts: int, dtype: torch.dtype, large: bool) -> dict[str, int | bool]:
        """See `Tile.options`.

        Args:
            large: on sm_90 and later. Before, ptxas saves registers of few rows so that one more
                program runs, and then has too few. It does not where it is told a limit.
        """
        options: dict[str, int | bool] = {"num_warps": parts, "num_stages": 1}
        options["enable_fp_fusion"] = True
        limited = not large and self.rows < 32 and dtype != torch.float32
        return options | {"maxnreg": 255} if limited else options


@dataclass(frozen=True)
class TallTile:
    """Slots of one program on bit planes that decodes each weight once for all of them.

    Attributes:
        blocks: of 16 outputs.
        warps: each has some of the blocks.
        stages: units on their way at once.
    """

    rows: int
    blocks: int = 4
    warps: int = 4
    stages: int = 3

    def fits(self, parts: int) -> bool:
        """See `Tile.fits`."""
        return parts * self.blocks <= 2 * self.warps

    @property
    def constants(self) -> dict[str, int]:
        """The constants that the kernel is compiled for."""
        return {"ROWS": self.rows, "BLOCKS": self.blocks, "STAGES": self.stages}

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
# The last two: 590 and 490 TFLOP/s of an H100's 780, where 8,192 tokens pass both projections.
PREFILL = (
    Tile(64, 64),
    Tile(128, 64, halves=True),
    Tile(128, 128, warps=8, halves=True),
    Tile(128, 128, warps=8, stages=4, halves=True),
    Tile(128, 256, warps=8, stages=4, halves=True),
)
# Bit planes, of few rows and, in linear layers, of 32 or more: all tiles give the same bits.
PLANES = (
    PlaneTile(8),
    PlaneTile(8, fetch=True),
    PlaneTile(8, unroll=2, fetch=True),
    PlaneTile(8, unroll=3),
    PlaneTile(8, unroll=4),
    PlaneTile(16, fetch=True),
)
PREFILL_PLANES = (
    PlaneTile(16, two=True),
    PlaneTile(32, two=True),
    PlaneTile(64, two=True),
)
# Bit planes of 32 rows and more of an expert.
TALL = (
    TallTile(64, stages=4),
    TallTile(64, blocks=8),
    TallTile(64, blocks=8, warps=8),
    TallTile(32),
)

_chosen: dict[Hashable, Any] = {}
_Tile = TypeVar("_Tile", bound=Hashable)


def choose(
    key: Hashable,
    candidates: Sequence[_Tile],
    reference: _Tile,
    prepare: Callable[[], Callable[[_Tile], Callable[[], Tensor]]],
) -> _Tile:
    """The tile for a call of this shape; measures where there is a GPU and no graph is captured.

    Args:
        key: device, shapes and dtypes of the projection, and how many rows there are about.
        candidates: to be measured; the first is taken where nothing can be.
        reference: a tile that always runs, whose bits all others must have.
        prepare: makes a call of this shape; what that returns for a tile is timed.
    """
    if key not in _chosen:
        if INTERPRETED:
            return candidates[0]
        if torch.cuda.is_current_stream_capturing():
            return reference
        _chosen[key] = fastest(candidates, reference, prepare(), _milliseconds)
    chosen: _Tile = _chosen[key]
    return chosen


def fastest(
    candidates: Sequence[_Tile],
    reference: _Tile,
    run: Callable[[_Tile], Callable[[], Tensor]],
    measure: Callable[[Callable[[], Tensor]], float],
) -> _Tile:
    """The fastest of the candidates whose result has the bits of the reference's."""
    expected = run(reference)().view(torch.uint8)
    times: dict[_Tile, float] = {}
    for tile in dict.fromkeys((reference, *candidates)):
        try:
            call = run(tile)
            if torch.equal(call().view(torch.uint8), expected):
                times[tile] = measure(call)
        except OutOfResources:  # needs more shared memory than this GPU has
            continue
    return min(times, key=lambda tile: times[tile], default=reference)


def _milliseconds(function: Callable[[], Tensor]) -> float:
    """Return the time of a replay: what the host does to launch takes longer than most kernels, and
    varies."""
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
