"""When nobody looks for drafts: such steps cost what they would without speculation, and are the
measure of all others."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median

FIRST = 8
"""Plain steps before looking begins with a new number of sequences."""
EVERY, BURST = 64, 2
"""Steps of looking after which so many plain ones are measured again."""

TOGETHER = 0.05
"""Seconds of plain steps that are learnt from together."""
OUTLIER = 2.0
"""Times the median that one of them may count for."""


class Rest:
    """Counts steps."""

    def __init__(self) -> None:
        self._plain = Counter[int]()  # by sequences
        self._left = self._looked = 0

    def begins(self, batch: int) -> bool:
        """A step of so many sequences begins; whether nobody looks for drafts in it."""
        if self._left == 0 and self._plain[batch] < FIRST:
            self._left = FIRST - self._plain[batch]
        elif self._left == 0:
            self._looked += 1
            if self._looked % EVERY:
                return False
            self._left = BURST
        self._left -= 1
        self._plain[batch] += 1
        return True

    def take(self, steps: int) -> None:
        """Nobody needs to look in the next steps."""
        self._left = max(self._left, steps)


class Rested:
    """Plain steps of as many sequences, one after the other, until they are learnt from."""

    def __init__(self) -> None:
        self.batch = 0
        self._seconds: list[float] = []
        self._begun, self._total = 0, 0.0

    def goes_on(self, batch: int) -> bool:
        """Whether another one of so many sequences belongs to those before."""
        unbroken = 0 < len(self._seconds) == self._begun
        return batch == self.batch and unbroken and self._total < TOGETHER

    def begin(self, batch: int) -> None:
        self.batch = batch
        self._begun += 1

    def end(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._total += seconds

    def take(self) -> tuple[float, int] | None:
        """Mean seconds of them, and how many they were, and begin anew; None where a prompt was
        read in one."""
        seconds, complete = self._seconds, len(self._seconds) == self._begun
        self._seconds, self._begun, self._total = [], 0, 0.0
        if not seconds or not complete:
            return None
        most = OUTLIER * median(seconds)
        return fmean(min(each, most) for each in seconds), len(seconds)
