"""Models that see all of a prompt and only the last tokens of what they write (UnlimitedOCR).

transformers gives such a model cache layers that take what is read first for the prompt.
`answer_window` finds them by trying, and `AnswerWindow` is the same rule for our caches.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kernels.cpu.kv import BLOCK
from moe.kv.visibility import RowVisibility, SeenRow


class AnswerWindow(RowVisibility):
    """A token sees the prompt, and the last `tokens` of what is behind it, its own among them."""

    name: ClassVar[str] = "answer"
    lossy: ClassVar[bool] = False

    def row(self, prompt: int, position: int) -> SeenRow | None:
        begin = position + 1 - self.tokens
        if begin <= prompt:
            return None
        return SeenRow(None, position // BLOCK + 1, gap=(prompt, begin))

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        begin = position // BLOCK * BLOCK
        first, end = -(-prompt // BLOCK), max(begin + 1 - self.tokens, 0) // BLOCK
        return np.arange(first, max(first, end), dtype=np.int32)

    def most_held(self, prompt: int, length: int) -> int:
        # Parts of blocks, and those that are not given up at once.
        return min(length, prompt + self.tokens + 6 * BLOCK)

    def most_forked(self, prompt: int, length: int) -> int:
        return min(length, prompt + self.tokens)


def answer_window(layer: Any) -> int:
    """Tokens behind the prompt that a cache layer shows beside all of the prompt; 0 for other
    layers. What such a layer keeps depends on what is read first."""
    window, kept = getattr(layer, "sliding_window", None), set[int]()
    if not isinstance(layer, DynamicSlidingWindowLayer) or not window:
        return 0
    for first in (1, window + 2):
        own = copy.deepcopy(layer)
        for count in (first, window + 3 - first, 1):
            rows = torch.zeros(1, 1, count, 1)
            keys, _ = own.update(rows, rows)
        kept.add(keys.shape[2])
    return int(window) if len(kept) > 1 else 0
