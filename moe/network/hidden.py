"""Final hidden states, kept beside a sequence's keys and values for what reads them later.

A pass of one sequence hands its rows over without a copy: the cache keeps views of them. Rows come
and go with the tokens: `cut` and `fork` treat both alike. Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.network.kv_cache import KVCache

KEPT = 256
"""Final hidden states that a sequence keeps for the layer. One that drafts again after a long rest,
or after a long prompt, begins with so many tokens; the model's hidden states know the others."""
SPARE = 4
"""How many times its own memory a view may keep alive; else its rows are copied."""


class HiddenKV(KVCache):
    """A KV cache that also keeps the final hidden states of the last tokens read."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._rows: list[Tensor] = []

    @property
    def hidden_rows(self) -> int:
        """How many of the last tokens have a row."""
        return sum(map(len, self._rows))

    def hidden(self) -> Tensor:
        """``(hidden_rows, H)``."""
        return self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)

    def keep_hidden(self, rows_TH: Tensor) -> None:
        """Keep the rows of the last T tokens, which have just been read, and of some before: `KEPT`
        to twice as many."""
        if len(rows_TH) > KEPT:
            self._rows, rows_TH = [], rows_TH[-KEPT:]
        if rows_TH.untyped_storage().nbytes() > SPARE * rows_TH.nbytes:
            rows_TH = rows_TH.clone()
        self._rows.append(rows_TH)
        if self.hidden_rows > 2 * KEPT:
            self._rows = [self.hidden()[-KEPT:].clone()]

    def keep_last(self) -> None:
        """Forget all rows but the last token's."""
        self._rows = [self._rows[-1][-1:]]

    def forget_hidden(self) -> None:
        """Something has used the rows."""
        self._rows = []

    def cut(self, length: int) -> None:
        self._drop(self.length - length)
        super().cut(length)

    def fork(self, capacity: int, length: int) -> HiddenKV:
        copied = super().fork(capacity, length)
        assert isinstance(copied, HiddenKV)
        copied._rows = list(self._rows)
        copied._drop(self.length - length)
        return copied

    def _drop(self, count: int) -> None:
        while self._rows and count > 0:
            last = self._rows.pop()
            if len(last) > count:
                self._rows.append(last[:-count])
            count -= len(last)


class MtpKV(HiddenKV):
    """A sequence's cache, and that of the layer.

    Attributes:
        head: keys and values of the layer, a row for each token after the first: it has read the
            token, and the model's hidden state of the one before. It lacks rows where tokens came
            without hidden states: behind a known prefix, and after long rests.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.head = HiddenKV(capacity + KEPT)  # a draft may reach beyond the end

    def fork(self, capacity: int, length: int) -> MtpKV:
        copied = super().fork(capacity, length)
        assert isinstance(copied, MtpKV)
        # The last row read has seen the token behind the last hidden state that is gone.
        seen = self.length - self.hidden_rows + 1
        rows = max(self.head.length - max(seen - length, 0), 0)
        copied.head = self.head.fork(capacity + KEPT, rows)
        copied.head.forget_hidden()
        return copied


def keep_rows(caches: Sequence[object], sizes: Sequence[int], hidden_TH: Tensor) -> None:
    """Give each sequence's cache its part of a pass's final hidden states, if it keeps them."""
    for cache, rows in zip(caches, hidden_TH.split(list(sizes)), strict=True):
        if isinstance(cache, HiddenKV):
            cache.keep_hidden(rows)
