"""The compiled choice of ranks: `experts.dispatch.assignment` and `routing.balance` in one call.

Legend: R ranks, T tokens of all ranks, K slots, E experts, A slots that this rank serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.calls import NUMBER, POINTER, SIZE, declare

Ids = NDArray[np.int16]
Ints = NDArray[np.int64]
Shapes = Sequence[tuple[int, ...]]


class Assigned(NamedTuple):
    """What `experts.dispatch.assignment.Assignment` and its `slots` hold, by the same names."""

    loads_E: Ints
    ids_TK: Ints
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

    def __call__(self, tables: Sequence[Ids], rank: int, holders: Ints, experts: int) -> Assigned:
        """The part of one rank.

        Args:
            tables: contiguous ``(tokens, slots)`` ids of each rank, -1 for unused slots.
            holders: as `experts.placement.Placement.holders`.
            experts: E.

        Raises:
            IndexError: an id outside [-1, E).
        """
        shapes, ranks = [table.shape for table in tables], len(tables)
        out = np.empty(numbers(shapes, shapes[rank][0], experts), np.int64)
        done = self._call(
            (POINTER * ranks)(*[address(table) for table in tables]),
            (SIZE * ranks)(*[tokens for tokens, _ in shapes]),
            (SIZE * ranks)(*[slots for _, slots in shapes]),
            address(holders),
            ranks,
            max(slots for _, slots in shapes),
            experts,
            rank,
            address(out),
        )
        if done:
            raise bad_id(experts)
        return assigned(out, shapes, shapes[rank][0], experts)


def numbers(shapes: Shapes, own: int, experts: int) -> int:
    """That `moe_assign` writes, for the ``(tokens, slots)`` of all ranks and the tokens of one."""
    return loads_at(shapes, own) + experts


def loads_at(shapes: Shapes, own: int) -> int:
    """Where tokens of each expert begin in it, behind all else."""
    size, slots = _size(shapes)
    return 4 * size + 2 * len(shapes) + 2 + (own * slots + 1) // 2


def counts_at(shapes: Shapes) -> int:
    """Where numbers of slots begin in it: `served_R`, `returned_R`, pairs and served."""
    return 4 * _size(shapes)[0]


def assigned(out: Ints, shapes: Shapes, own: int, experts: int) -> Assigned:
    """What it has written."""
    (size, slots), ranks, at = _size(shapes), len(shapes), counts_at(shapes)
    ends, loads = at + 2 * ranks + 2, loads_at(shapes, own)
    *told, pairs, served = out[at:ends].tolist()
    ids_TK, serving_TK = out[: 2 * size].reshape(2, -1, slots)
    return Assigned(
        loads_E=out[loads : loads + experts],
        ids_TK=ids_TK,
        serving_TK=serving_TK,
        token_A=out[2 * size : 2 * size + served],
        experts_A=out[3 * size : 3 * size + served],
        served_R=told[:ranks],
        returned_R=told[ranks:],
        position_TK=out[ends:loads].view(np.int32)[: own * slots].reshape(-1, slots),
        pairs=pairs,
    )


def _size(shapes: Shapes) -> tuple[int, int]:
    """T K and K of all ranks together."""
    slots = max(slots for _, slots in shapes)
    return sum(tokens for tokens, _ in shapes) * slots, slots


def bad_id(experts: int) -> IndexError:
    return IndexError(f"an expert id is outside [-1, {experts})")


def address(array: NDArray[Any]) -> int:
    """Of its first element; `array.ctypes.data` takes three times as long."""
    found: int = array.__array_interface__["data"][0]
    return found
