"""What changes from step to step, in two tensors that never move, so that recorded work finds it.

Legend: B rows a recording was made for, C caches (one a layer).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe.fused.rotary_table import RotaryTable
from moe.kv import SequenceKV, Work

_TOKEN, _POSITION, _PLACES = 0, 1, 3
_PADDING = -1


class Inputs:
    """Tokens, places and angles of at most ``rows`` rows; the others are padding.

    Attributes:
        tokens: ``(B,)`` int64, 0 in padding.
        places: ``(B, 2 + 2 C)`` int64, as `kernels.triton.attention` reads it; padding has the
            position -1.
        angles: of each rotary table ``(B, size / 2)`` cosines and sines.
    """

    def __init__(
        self, rows: int, caches: int, tables: Sequence[RotaryTable], device: torch.device
    ) -> None:
        self._caches, self._tables = caches, list(tables)
        sizes = [table.cos.shape[1] for table in tables for _ in range(2)]
        self._numbers = torch.zeros(rows, _PLACES + 2 * caches, dtype=torch.int64, device=device)
        self._floats = torch.zeros(rows, sum(sizes), device=device)
        self.tokens = self._numbers[:, _TOKEN]
        self.places = self._numbers[:, _POSITION:]
        parts = iter(self._floats.split(sizes, 1))
        self.angles = dict(zip(self._tables, zip(parts, parts, strict=True), strict=True))
        self.fill([])

    @property
    def padding(self) -> Tensor:
        """``(B,)`` bool."""
        return self.places[:, 0] < 0

    def fill(self, work: Sequence[Work]) -> None:
        """Put new tokens and where their sequences are in place, without waiting for the device."""
        numbers = np.zeros(tuple(self._numbers.shape), np.int64)
        numbers[:, _POSITION] = _PADDING
        begin = 0
        for item in work:
            cache, count = item.cache, len(item.token_ids)
            assert isinstance(cache, SequenceKV)
            cache.reserve(cache.length + count)
            own = numbers[begin : begin + count]
            own[:, _TOKEN] = item.token_ids
            own[:, _POSITION] = np.arange(cache.length, cache.length + count)
            own[:, _POSITION + 1] = cache.room
            own[:, _PLACES:] = cache.addresses(self._caches).reshape(-1)
            begin += count
        _send(self._numbers, torch.from_numpy(numbers))
        self._turn(torch.from_numpy(numbers[:begin, _POSITION]))

    def _turn(self, positions: Tensor) -> None:
        if not len(positions) or not self._tables:
            return
        floats = torch.zeros(tuple(self._floats.shape))
        begin = 0
        for table in self._tables:
            table.reserve(int(positions.max()) + 1)
            for values in (table.cos, table.sin):
                end = begin + values.shape[1]
                floats[: len(positions), begin:end] = values[positions]
                begin = end
        _send(self._floats, floats)


def _send(to: Tensor, values: Tensor) -> None:
    # torch keeps a pinned block from being used again until the device has read it.
    to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)
