"""Whether rows go to all ranks along with the ids, before anybody knows who needs them.

That saves an exchange. Where each token visits several experts of few ranks, nearly every row is
needed everywhere: with two ranks and eight experts, all but one in 256. Room is kept for as many
rows as ranks brought to the layers before, which all ranks know alike; in a step like the one
before none of it stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from experts.dispatch.agreement import INLINE, Head

WASTE = 1 / 16
"""Most rows that may go where nobody needs them, as a share."""
MEETINGS = 2
"""That are looked back to: halves of a step take turns."""


def nearly_all_needed(ranks: int, slots: float) -> bool:
    """Whether most tokens with so many slots need all ranks, wherever experts are."""
    return (1 - 1 / ranks) ** slots <= WASTE


class Rooms:
    """Room for rows in the messages of the next layer.

    Args:
        ranks: how many there are.
        tokens: whose rows have room on every rank, whatever is brought; None: see above.
    """

    def __init__(self, ranks: int, tokens: int | None) -> None:
        self._ranks, self._fixed = ranks, tokens
        self._seen: list[Sequence[Head]] = []

    def bytes_R(self, width: int) -> list[int]:
        """For each rank; the same on all.

        Args:
            width: bytes of the longest row that there can be, for static room.
        """
        if self._fixed is not None:
            return [self._fixed * width] * self._ranks
        if not self._pays():
            return [0] * self._ranks
        own = zip(*self._seen, strict=True)
        longest = max(head.width for heads in self._seen for head in heads if head.tokens)
        return [longest * max(head.tokens for head in heads) for heads in own]

    def saw(self, heads: Sequence[Head]) -> None:
        """What ranks have brought to a layer."""
        self._seen = [*self._seen[1 - MEETINGS :], heads]

    def _pays(self) -> bool:
        brought = [head for heads in self._seen for head in heads if head.tokens]
        if not brought or max(head.tokens * head.slots for head in brought) > INLINE:
            return False
        return nearly_all_needed(self._ranks, min(head.slots for head in brought))
