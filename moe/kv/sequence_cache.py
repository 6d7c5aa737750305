"""What a model keeps of one sequence: `SequenceCache`, and `TransformersCache` for models whose
passes cannot be packed. `moe.kv.cache.KVCache` is that of all others."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.kv.hidden import HiddenRows
    from moe.kv.layout import KVFormat, Shape


class SequenceCache:
    """The state of one sequence. What it does not say otherwise is that of a state which only its
    model can read.

    Attributes:
        length: tokens that have been read.
        offset: what the position of a token behind the prompt differs by from its index (images
            take fewer positions than tokens).
        hidden: the final hidden states of the last tokens; None: nobody reads them.
    """

    length: int
    offset: int
    hidden: HiddenRows | None = None

    @property
    def kv(self) -> Any:
        """Itself as a `moe.kv.cache.KVCache`, which packed passes and compiled steps write."""
        raise AssertionError(f"{type(self).__name__} is not read by packed passes")

    @property
    def reusable(self) -> bool:
        """Other sequences can go on from a part of it, so that the prefix cache keeps it."""
        return False

    @property
    def recurrent(self) -> bool:
        """It has states, so that it cannot be cut or forked anywhere."""
        return False

    @property
    def shared_tokens(self) -> int:
        """Of its tokens, those whose memory counts for another sequence that has them too, or is
        given up; bytes count as so many tokens' as they make."""
        return 0

    @property
    def dropped_tokens(self) -> int:
        """The memory that it has given up behind windows, in tokens."""
        return 0

    @property
    def state_tokens(self) -> int:
        """Tokens of keys and values that take as many bytes as one set of recurrent states."""
        return 0

    @property
    def buffer_shapes(self) -> Mapping[int, Shape]:
        """Of each layer of attention whose rows are in buffers."""
        return {}

    def layer_bytes(self, form: KVFormat | None = None) -> dict[int, int]:
        """Bytes of a token in each layer of attention whose rows are in buffers.

        Args:
            form: how rows would be stored; None: as they are.
        """
        return {}

    def keep_all(self, keeps: bool) -> None:
        """Keep what no later token of the sequence sees, as others may go on from there; or give it
        up as soon as it is not seen."""

    def prompt_read(self) -> None:
        """What it has read is its prompt: from now on tokens see what `moe.kv.visibility` says. A
        fork has yet to be told."""

    def mark(self) -> None:
        """Let `cut` come back to the present length after any number of passes."""

    def cut(self, length: int) -> None:
        """Forget all tokens after the first ``length``: `mark`, or within the last decode pass."""
        raise AssertionError("not for this state")

    def fork(self, capacity: int, length: int) -> SequenceCache:
        """A copy that has read the first ``length`` tokens."""
        raise AssertionError("not for this state")


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
