"""Finds matrices that a model divides by the sums of their rows and of their columns in turn, some
twenty times (Sinkhorn and Knopp), as hyper-connections do with the weights of their streams.

Recorded, that is three operations on a few numbers for each of many divisions, and the step spends
most of its time between them. `with_balancing` makes one operation of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from kernels.cpu.program import SQUARE
from moe.decode.recorder import Operation, Value


class _Division(NamedTuple):
    """``made = x / (x.sum(dim, keepdim=True) + eps)``; dim is -1 or -2."""

    x: Value
    dim: int
    eps: float
    made: Value


def with_balancing(operations: Sequence[Operation]) -> list[Operation]:
    """The operations, with one ``sinkhorn`` ``(x, first dim, divisions, eps)`` for each run of
    divisions by turns whose results between nothing else reads."""
    read = Counter(
        leaf.buffer
        for operation in operations
        for leaf in tree_leaves((operation.args, dict(operation.kwargs)))
        if isinstance(leaf, Value)
    )
    made: list[Operation] = []
    at = 0
    while at < len(operations):
        run: list[_Division] = []
        for start in range(at, len(operations) - 2, 3):
            found = _division(operations[start : start + 3], read)
            if found is None or (run and not _follows(found, run[-1], read)):
                break
            run.append(found)
        if len(run) > 1:
            first, last = run[0], run[-1]
            args = first.x, first.dim, len(run), first.eps
            made.append(Operation("sinkhorn", args, {}, (last.made,)))
            at += 3 * len(run)
        else:
            made.append(operations[at])
            at += 1
    return made


def _division(three: Sequence[Operation], read: Counter[int]) -> _Division | None:
    if [operation.name for operation in three] != ["sum", "add", "div"]:
        return None
    (total,), (raised,), (made,) = (operation.outputs for operation in three)
    x, dims, *keep = three[0].args
    if not isinstance(x, Value) or keep != [True] or len(dims) != 1 or x.meta.ndim < 2:
        return None
    dim, size = dims[0] % x.meta.ndim - x.meta.ndim, x.meta.shape[-1] * x.meta.shape[-2]
    eps = three[1].args[1]
    if dim < -2 or size > SQUARE or not isinstance(eps, float) or x.meta.dtype != torch.float32:
        return None
    if not _same(three[1].args[0], total) or three[1].kwargs or three[2].kwargs:
        return None
    if not (_same(three[2].args[0], x) and _same(three[2].args[1], raised)):
        return None
    if read[total.buffer] != 1 or read[raised.buffer] != 1:
        return None
    return _Division(x, dim, eps, made)


def _follows(division: _Division, before: _Division, read: Counter[int]) -> bool:
    """It divides what the one before has made, which nothing else reads, by the other sums."""
    return (
        _same(division.x, before.made)
        and read[before.made.buffer] == 2
        and (division.dim, division.eps) == (-3 - before.dim, before.eps)
    )


def _same(one: object, other: Value) -> bool:
    return (
        isinstance(one, Value)
        and one.buffer == other.buffer
        and one.meta.shape == other.meta.shape
        and one.meta.stride() == other.meta.stride()
        and one.meta.storage_offset() == other.meta.storage_offset()
    )
