"""Where a sequence had its last tokens before: what followed them then may follow again."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2
"""Last tokens that must have been seen before, tried in this order."""
SIZES = (2, 3, 4, 8, 16, 32)
"""Lengths of runs that are told apart. On greedy text of the shipped model 3.0 of 6 tokens are
right behind a run of 4 to 7, 4.0 behind one of 8 to 15, and 5.9 behind 32 and more."""


class History:
    """Where each run of tokens of one sequence was last seen.

    Attributes:
        size: of the run behind which the last guess was found, as `SIZES` tell them apart.
    """

    def __init__(self) -> None:
        self.size = 0
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place behind it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end. A run becomes known when a token follows it."""
        for token in tokens:
            known, end = self._tokens, len(self._tokens)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(known[-size:])] = end
            known.append(token)

    def following(self, limit: int) -> list[int]:
        """What followed the longest known run that the sequence ends with, where it was last.

        At the end of the sequence it goes round, as what repeats itself does.
        """
        tokens = self._tokens
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = self._ends.get(tuple(tokens[-size:]))
            if start is not None:
                self.size = self._reach(start, size)
                found = tokens[start : start + limit]
                return (found * limit)[:limit] if len(found) < limit else found
        return []

    def _reach(self, start: int, size: int) -> int:
        """How far back what is before ``start`` is like the end, where so many tokens are."""
        tokens = self._tokens
        for longer in SIZES[SIZES.index(size) + 1 :]:
            if longer > start or tokens[start - longer : start] != tokens[-longer:]:
                break
            size = longer
        return size
