"""Where a sequence had its last tokens before: what followed them then may follow again."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2
"""Last tokens that must have been seen before, tried in this order."""
SIZES = (2, 3, 4, 6, 8, 12, 16, 32)
"""Lengths of runs that are told apart."""
MOST = 32
"""Tokens of a draft at most."""
KINDS = [bisect(SIZES, size) - 1 for size in range(SIZES[-1] + MOST)]
"""Of a run by its length, the place in `SIZES`."""


class History:
    """Where each run of tokens of one sequence was last seen.

    Attributes:
        size: of the run behind which the last guess was found, as `SIZES` tell them apart.
    """

    def __init__(self) -> None:
        self.size = 0
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place behind it
        self._runs: list[tuple[int, ...]] = []  # at the end, longest first

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end. A run becomes known when a token follows it."""
        known, ends, runs = self._tokens, self._ends, self._runs
        for token in tokens:
            end = len(known)
            for run in runs:
                ends[run] = end
            known.append(token)
            last = tuple(known[-LONGEST:])
            runs = [last[skip:] for skip in range(len(last) - SHORTEST + 1)]
        self._runs = runs

    def following(self, limit: int) -> list[int]:
        """What followed the longest known run that the sequence ends with, where it was last.

        At the end of the sequence it goes round, as what repeats itself does.
        """
        for run in self._runs:
            if run in self._ends:
                start = self._ends[run]
                self.size = self._reach(start, len(run))
                found = self._tokens[start : start + limit]
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
