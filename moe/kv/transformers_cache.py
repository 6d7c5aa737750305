"""The state of a sequence of a model whose passes cannot be packed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from moe.kv.cache import SequenceCache


class TransformersCache(SequenceCache):
    """State of one sequence in the cache class of its architecture. Such sequences are not drafted
    for.

    transformers changes it in place, layer by layer: do not use it after a cancelled pass.
    """

    def __init__(self, length: int = 0, state: Any = None, offset: int = 0) -> None:
        self.length, self.state, self.offset = length, state, offset

    def cut(self, length: int) -> None:
        assert length == self.length, "states cannot be cut"

    def fork(self, capacity: int, length: int) -> TransformersCache:
        """A copy that has read the same tokens, all of them: states cannot be cut."""
        assert length == self.length
        return TransformersCache(length, deepcopy(self.state), self.offset)
