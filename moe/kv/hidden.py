"""Final hidden states, kept beside a sequence's keys and values for what reads them later.

A decode pass hands its rows over without a copy. Rows come and go with the
tokens: `KVCache.cut` and `KVCache.fork` treat both alike. Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

KEPT = 32
"""Final hidden states that a sequence keeps for the layer. One that drafts again after a long rest,
or after a long prompt, begins with so many tokens; the model's hidden states know the others. With
16 or more of the shipped model as much is accepted, and reading them costs a trial of drafts."""
FEW = 64
"""Rows of a pass that sequences keep alive as they are, for one of them; of larger ones each copies
its own."""


class HiddenRows:
    """The final hidden states of the last tokens that a sequence has read: as many as ``len``."""

    def __init__(self) -> None:
        # Rows, and which of them: cut out only when they are read, as most never are.
        self._parts: deque[tuple[Tensor, int, int]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def joined(self) -> Tensor:
        """``(len, H)``."""
        rows = [whole[start:end] for whole, start, end in self._parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def keep(self, rows_TH: Tensor, start: int = 0, end: int | None = None) -> None:
        """Keep rows ``start`` to ``end`` of a pass, those of the last tokens, which have just been
        read, and of some before: `KEPT` in all, and what else came in the pass of the first."""
        end = len(rows_TH) if end is None else end
        if end - start > KEPT:
            self.clear()
            start = end - KEPT
        if len(rows_TH) > FEW:
            rows_TH, start, end = rows_TH[start:end].clone(), 0, end - start
        self._parts.append((rows_TH, start, end))
        self._count += end - start
        while self._count - (size := self._parts[0][2] - self._parts[0][1]) >= KEPT:
            self._parts.popleft()
            self._count -= size

    def keep_last(self) -> None:
        """Forget all rows but the last token's."""
        whole, _, end = self._parts[-1]
        self._parts, self._count = deque([(whole, end - 1, end)]), 1

    def clear(self) -> None:
        """Something has used the rows."""
        self._parts, self._count = deque(), 0

    def drop(self, count: int) -> None:
        """The last ``count`` tokens are gone."""
        self._count = max(self._count - count, 0)
        while self._parts and count > 0:
            whole, start, end = self._parts.pop()
            if end - start > count:
                self._parts.append((whole, start, end - count))
            count -= end - start

    def without(self, count: int) -> HiddenRows:
        """A copy without the rows of the last ``count`` tokens."""
        copy = HiddenRows()
        copy._parts, copy._count = self._parts.copy(), self._count
        copy.drop(count)
        return copy
