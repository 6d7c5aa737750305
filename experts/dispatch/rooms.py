"""Whether rows go to all ranks along with the ids, before anybody knows who needs them.

That saves an exchange. Where each token visits several experts of few ranks, nearly every row is
needed everywhere: with two ranks and eight experts, all but one in 256. On one machine a row takes
less than a message, and compiled steps (`at_once`) need rows that come with their ids, so more may
come in vain. Room is kept for as many rows as ranks brought to the layers before, which all ranks
know alike; in a step like the one before none of it stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from experts.dispatch.agreement import INLINE, Meeting

WASTE, NEAR_WASTE = 1 / 16, 1 / 2
"""Most rows that may go where nobody needs them, as a share; and between processes of a machine."""
MEETINGS = 2
"""That are looked back to: halves of a step take turns."""


def rows_go_along(ranks: int, slots: float, near: bool) -> bool:
    """Whether enough tokens with so many slots need all ranks, wherever experts are."""
    return (1 - 1 / ranks) ** slots <= (NEAR_WASTE if near else WASTE)


class Rooms:
    """Room for rows in the messages of the next layer.

    Args:
        ranks: how many there are.
        tokens: whose rows have room on every rank, whatever is brought; None: see above.
        near: rows are waste only where they are many; the same on all ranks.
    """

    def __init__(self, ranks: int, tokens: int | None, near: bool) -> None:
        self._ranks, self._fixed, self._near = ranks, tokens, near
        self._seen: tuple[Meeting, ...] = ()
        self._room_R = [0] * ranks

    def bytes_R(self, width: int) -> Sequence[int]:
        """For each rank; the same on all.

        Args:
            width: bytes of the longest row that there can be, for static room.
        """
        return self._room_R if self._fixed is None else [self._fixed * width] * self._ranks

    @property
    def steady(self) -> Meeting | None:
        """What ranks have brought to the last layers, if always the same."""
        seen = self._seen
        return seen[0] if len(seen) == MEETINGS and seen[0] is seen[-1] else None

    def saw(self, meeting: Meeting) -> None:
        """What ranks have brought to a layer."""
        seen = (*self._seen, meeting)[-MEETINGS:]
        if seen != self._seen:
            self._seen, self._room_R = seen, self._room(seen)

    def _room(self, seen: Sequence[Meeting]) -> list[int]:
        brought = [head for meeting in seen for head in meeting.heads if head.tokens]
        if not brought or max(head.tokens * head.slots for head in brought) > INLINE:
            return [0] * self._ranks
        if not rows_go_along(self._ranks, min(head.slots for head in brought), self._near):
            return [0] * self._ranks
        longest = max(head.width for head in brought)
        return [longest * max(own) for own in zip(*(one.tokens_R for one in seen), strict=True)]
