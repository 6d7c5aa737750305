"""When nobody looks for drafts: such steps cost what they would without speculation, and are the
measure of all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

FIRST = 8
"""Plain steps before looking begins with a new number of sequences."""
EVERY, BURST = 128, 2
"""Steps of looking after which so many plain ones are measured again."""
OUTLIER = 2.0
"""Times the median that one of them may count for."""


class Rest:
    """Counts steps."""

    def __init__(self) -> None:
        self._plain = Counter[int]()  # by sequences
        self._left = self._looked = 0

    def steps(self, batch: int) -> int:
        """Plain steps to come of so many sequences; 0 where one begins that looks for drafts."""
        if self._left == 0 and self._plain[batch] < FIRST:
            self._left = FIRST - self._plain[batch]
        elif self._left == 0:
            self._looked += 1
            if self._looked % EVERY == 0:
                self._left = BURST
        return self._left

    def take(self, steps: int) -> int:
        """Nobody needs to look in the next steps; how many those are in all."""
        self._left = max(self._left, steps)
        return self._left

    def over(self, batch: int, steps: int) -> None:
        """So many of them were plain."""
        self._left = max(self._left - steps, 0)
        self._plain[batch] += steps


def typical(seconds: Sequence[float]) -> float:
    """Mean of steps that are alike."""
    most = OUTLIER * median(seconds)
    return fmean(min(each, most) for each in seconds)
