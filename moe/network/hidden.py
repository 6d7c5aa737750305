"""Final hidden states, kept beside a sequence's keys and values for what reads them later.

A pass of one sequence hands its rows over without a copy: they are views. Rows come and go with the
tokens: `KVCache.cut` and `KVCache.fork` treat both alike. Legend: T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 32
"""Final hidden states that a sequence keeps for the layer. One that drafts again after a long rest,
or after a long prompt, begins with so many tokens; the model's hidden states know the others. With
16 or more of the shipped model as much is accepted, and reading them costs a trial of drafts."""
SPARE = 4
"""How many times its own memory a view may keep alive; else its rows are copied."""


class HiddenRows:
    """The final hidden states of the last tokens that a sequence has read: as many as ``len``."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._count = 0  # counted along: each step of a sequence that does not draft asks for it

    def __len__(self) -> int:
        return self._count

    def joined(self) -> Tensor:
        """``(len, H)``."""
        return self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)

    def keep(self, rows_TH: Tensor) -> None:
        """Keep the rows of the last T tokens, which have just been read, and of some before: `KEPT`
        to twice as many."""
        if len(rows_TH) > KEPT:
            self.clear()
            rows_TH = rows_TH[-KEPT:]
        if rows_TH.untyped_storage().nbytes() > SPARE * rows_TH.nbytes:
            rows_TH = rows_TH.clone()
        self._rows.append(rows_TH)
        self._count += len(rows_TH)
        if self._count > 2 * KEPT:
            self._rows, self._count = [self.joined()[-KEPT:].clone()], KEPT

    def keep_last(self) -> None:
        """Forget all rows but the last token's."""
        self._rows, self._count = [self._rows[-1][-1:]], 1

    def clear(self) -> None:
        """Something has used the rows."""
        self._rows, self._count = [], 0

    def drop(self, count: int) -> None:
        """The last ``count`` tokens are gone."""
        self._count = max(self._count - count, 0)
        while self._rows and count > 0:
            last = self._rows.pop()
            if len(last) > count:
                self._rows.append(last[:-count])
            count -= len(last)

    def without(self, count: int) -> HiddenRows:
        """A copy without the rows of the last ``count`` tokens."""
        copy = HiddenRows()
        copy._rows, copy._count = list(self._rows), self._count
        copy.drop(count)
        return copy
