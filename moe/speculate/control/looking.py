"""When nobody looks for drafts: at first, to know plain steps, and where it never paid."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from moe.speculate.control.upkeep import Upkeep

FIRST = 8
"""Plain steps before looking begins with a new number of sequences."""
EVERY, BURST = 128, 2
"""Steps with drafts, and none without, after which so many plain ones are measured again."""
HOPE, HELD, MEMORY = 0.18, 16, 64
"""Plain steps that looking gains before anything has been seen; steps that this counts for; steps
that are remembered."""
SHARE, LONGEST = 0.005, 128
"""Of the time that looking may take where it does not pay; steps between two looks at most."""
OUTLIER = 2.0
"""Times what was expected, or the median of its like, that a step may count for."""


class Looking:
    """Mean gain of steps that look for drafts, everything included, and rests between them.

    Attributes:
        gain: of a step, in plain ones.
    """

    def __init__(self) -> None:
        self.gain = HOPE
        self._known = set[int]()  # numbers of sequences
        self._drafted = self._left = self._rest = self._longest = 0
        self._memory = HELD
        self._least = 0.0
        self._upkeep = Upkeep(SHARE)

    def rests(self, batch: int) -> int:
        """Plain steps to come; 0 where one begins that looks."""
        if batch not in self._known:
            self._known.add(batch)
            return FIRST
        if self._drafted >= EVERY:
            self._drafted = 0
            return BURST
        left, self._left = self._left, 0
        return left

    def found(self, gain: float) -> None:
        """Drafts were made, which gained so many plain steps: more may follow where they did."""
        self._drafted += 1
        self._note(gain, 1)
        if gain > 0:
            self._rest = self._left = 0
        else:
            self.missed()

    def missed(self) -> None:
        """Nothing was drafted, or in vain. Where looking does not pay, each rest is twice as long
        as the one before, up to where looking takes its share of the time. It has to gain what a
        look costs beside: luck is a part of what it has gained."""
        if self.gain <= self._least:
            self._left = self._rest = min(2 * self._rest + 1, self._longest)

    def plainly(self, step: float, looks: int, looking: float) -> None:
        """Plain steps are over, of ``step`` seconds; looking for drafts before some of them has
        taken ``looking`` seconds in all."""
        self._drafted = 0
        if looks:
            self._note(-looking / looks / step, looks)
            self._upkeep.took(looking / looks)
        self._longest = min(self._upkeep.steps(step), LONGEST)
        self._least = self._upkeep.seconds / step

    def _note(self, gain: float, steps: int) -> None:
        self._memory = min(self._memory + steps, MEMORY)
        self.gain += (1 - (1 - 1 / self._memory) ** steps) * (gain - self.gain)


def typical(seconds: Sequence[float]) -> float:
    """Mean of steps that are alike."""
    most = OUTLIER * median(seconds)
    return fmean(min(each, most) for each in seconds)
