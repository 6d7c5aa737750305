"""The compiled choice of ranks: `experts.dispatch.assignment` and `routing.balance` in one call.

Legend: R ranks, T tokens of all ranks, K slots, E experts, A slots that this rank serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.calls import NUMBER, POINTER, SIZE, declare

Ints = NDArray[np.int64]


class Assigned(NamedTuple):
    """What `experts.dispatch.assignment.Assignment` and its `slots` hold, by the same names."""

    loads_E: Ints
    serving_TK: Ints
    token_A: Ints
    experts_A: Ints
    served_R: list[int]
    returned_R: list[int]
    position_TK: NDArray[np.int32]
    pairs: int


class NativeAssign:
    """Who serves what, by a compiled library (see kernels/cpu/build.py)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = (SIZE,) * 4
        declare(library, {"moe_assign": (NUMBER, (*(POINTER,) * 4, *sizes, POINTER))})
        self._call = library.moe_assign

    def __call__(
        self,
        experts_TK: Ints,
        tokens_R: Sequence[int],
        rank: int,
        begin_E: Ints,
        holders: Ints,
    ) -> Assigned:
        """The part of one rank.

        Args:
            experts_TK: contiguous ids of the tokens of all ranks, -1 for unused slots.
            begin_E: ``(E + 1,)``: where each expert's ranks begin among the holders.

        Raises:
            IndexError: an id outside [-1, E).
        """
        ranks, experts, size = len(tokens_R), len(begin_E) - 1, experts_TK.size
        slots, own = experts_TK.shape[1], tokens_R[rank] * experts_TK.shape[1]
        counts = experts + 3 * size
        ends = counts + 2 * ranks + 2
        out = np.empty(ends + (own + 1) // 2, np.int64)
        done = self._call(
            experts_TK.ctypes.data,
            (ctypes.c_int64 * ranks)(*tokens_R),
            begin_E.ctypes.data,
            holders.ctypes.data,
            ranks,
            slots,
            experts,
            rank,
            out.ctypes.data,
        )
        if done:
            raise IndexError(f"an expert id is outside [-1, {experts})")
        *told, pairs, served = out[counts:ends].tolist()
        first = experts + size
        return Assigned(
            loads_E=out[:experts],
            serving_TK=out[experts:first].reshape(experts_TK.shape),
            token_A=out[first : first + served],
            experts_A=out[first + size : first + size + served],
            served_R=told[:ranks],
            returned_R=told[ranks:],
            position_TK=out[ends:].view(np.int32)[:own].reshape(-1, slots),
            pairs=pairs,
        )
