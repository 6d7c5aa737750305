"""When nobody looks for drafts: such steps cost what they would without speculation, and are the
measure of all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from moe.speculate.control.upkeep import Upkeep

FIRST = 8
"""Plain steps before looking begins with a new number of sequences."""
EVERY, BURST = 128, 2
"""Steps of looking after which so many plain ones are measured again."""
PIECES = 8, 128
"""A long rest is cut, as drafts that cost nothing are judged between its pieces: each is twice as
long as the one before, beginning with twice the first number, up to the second."""
LOOKING = 0.0025
"""Share of the time that looking for drafts may take where none have paid."""
OUTLIER = 2.0
"""Times what was expected, or the median of its like, that a step may count for."""


class Rest:
    """Counts steps.

    Attributes:
        batch: sequences of the last plain steps.
    """

    def __init__(self) -> None:
        self._plain = Counter[int]()  # by sequences
        self._left = self._looked = 0
        self._piece = PIECES[0]
        self._looking = Upkeep(LOOKING)
        self.batch = 1

    def steps(self, batch: int) -> int:
        """Plain steps to come of so many sequences; 0 where one begins that looks for drafts."""
        if self._left == 0 and self._plain[batch] < FIRST:
            self._left = FIRST - self._plain[batch]
        elif self._left == 0:
            self._looked += 1
            if self._looked % EVERY == 0:
                self._left = BURST
        return self._left

    def looked(self, seconds: float, step: float) -> None:
        """Looking where no drafts are in sight took so long: there is time until the next one."""
        self._looking.took(seconds)
        self.take(self._looking.steps(step))

    def take(self, steps: int) -> int:
        """Nobody needs to look in the next steps; how many those are in all."""
        self._left = max(self._left, steps)
        return self._left

    def piece(self, steps: int) -> int:
        """The beginning of so many plain steps."""
        self._piece = min(2 * self._piece, PIECES[1]) if steps else PIECES[0]
        return min(steps, self._piece)

    def wake(self) -> None:
        """There is something to look for."""
        self._left = 0

    def over(self, batch: int, steps: int) -> None:
        """So many of them were plain."""
        self.batch, self._left = batch, max(self._left - steps, 0)
        self._plain[batch] += steps


def typical(seconds: Sequence[float]) -> float:
    """Mean of steps that are alike."""
    most = OUTLIER * median(seconds)
    return fmean(min(each, most) for each in seconds)
