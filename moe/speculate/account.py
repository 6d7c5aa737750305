"""What drafting may still lose, and when to look for drafts at all.

`Account` charges everything that is not plain decoding with its whole time, looking for drafts and
learning included, and credits it with what its tokens would have taken plainly. The controller
takes no step that could lose more than there is room for if no draft of it were accepted. So in any
stretch of time drafting loses at most the share of it, `CREDIT` plain steps and `TRUST`; from the
beginning on, at most the share, `UNSPENT` steps and `TRUST`.

`Looking` decides on plain steps without a look: a few at first, to learn what they take, and longer
and longer rests where looking has gained nothing. `Upkeep` bounds work that takes time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

SHARE = 0.01
"""Of all time that may be lost to finding out whether drafts pay, and how."""
UNSPENT = 4.0
"""Plain steps' time to which that share adds up at most, for looking after a long time and a draft
or two; and what there is at the beginning, as drafts that are good from the first tokens on would
otherwise be missed for hundreds of steps."""
CREDIT = 24.0
"""Plain steps' time of earlier gains that may be lost again. Drafts that double the speed fail
several times running now and then; whoever gives them up then needs hundreds of steps to begin
anew."""
TRYING = 0.005
"""Of all time that trials may lose against the best that is known."""
TRUST = 12.0
"""Plain steps' time that may be lost beside that by drafts that the text itself speaks for: how
probable they are has been counted on tokens that came, whoever drafted, so a few wrong ones running
are bad luck."""
RECENT = 0.998
UPKEEP_FOLLOW = 0.2
LONGEST_WAIT = 1024
"""Steps that it waits at most."""
FIRST = 8
"""Plain steps before looking begins with a new number of sequences."""
EVERY, BURST = 128, 2
"""Steps with drafts, and none without, after which so many plain ones are measured again."""
HOPE, HELD, MEMORY = 0.18, 16, 64
"""Plain steps that looking gains before anything has been seen; steps that this counts for; steps
that are remembered."""
LOOKING_SHARE, LONGEST_REST = 0.005, 128
"""Of the time that looking may take where it does not pay; steps between two looks at most."""
OUTLIER = 2.0
"""Times what was expected, or the median of its like, that a step may count for."""


class Account:
    """Seconds that may be lost.

    Attributes:
        room: that may be lost now against plain decoding; below 0 where more has been lost.
        trials: made of what is not the best that is known.
    """

    def __init__(self) -> None:
        self.room, self.trials = 0.0, 0
        self._trying = 0.0  # seconds that trials may lose against the best that is known
        self._recent = self._saved = 0.0

    @property
    def gain(self) -> float:
        """Time that plain decoding would have taken of late over the time that was taken."""
        return 1.0 + self._saved / self._recent if self._recent else 1.0

    def affords(self, loss: float, trust: float = 0.0) -> bool:
        """Whether so many seconds may be lost, ``trust`` beyond what there is room for."""
        return loss <= self.room + trust

    def steps_until(self, room: float, step: float) -> int:
        """Plain steps, of ``step`` seconds, until there is room for so many of them to be lost."""
        return ceil(max(room - self.room / step, 0.0) / SHARE)

    def affords_trial(self, loss: float) -> bool:
        """Whether a trial may lose so many seconds, against the best that is known, too."""
        return loss <= self._trying

    def until_trial(self, loss: float, step: float) -> int:
        """Steps, of ``step`` seconds, until a trial may lose so many seconds."""
        return ceil(max(loss - self._trying, 0.0) / (TRYING * step))

    def tried(self, loss: float) -> None:
        """A trial has lost so many seconds, or gained below 0."""
        self.trials += 1
        self._trying -= max(loss, 0.0)

    def earn(self, seconds: float, step: float) -> None:
        """Plain decoding took so long, one step of it ``step`` seconds."""
        if not self._recent:
            self.room = UNSPENT * step
        self.room = max(self.room, min(self.room + SHARE * seconds, UNSPENT * step))
        self._pass(seconds, step)

    def settle(self, seconds: float, plain: float, step: float) -> None:
        """Something else took so long, and ``plain`` seconds would have brought as many tokens."""
        self.room = min(self.room + SHARE * seconds + plain - seconds, CREDIT * step)
        self._pass(seconds, step)
        self._saved = RECENT * self._saved + plain - seconds

    def _pass(self, seconds: float, step: float) -> None:
        self._recent = RECENT * self._recent + seconds
        self._trying = min(self._trying + TRYING * seconds, UNSPENT * step)


@dataclass
class Upkeep:
    """Something that is to take no more than a share of the time.

    Attributes:
        seconds: that it has taken of late.
    """

    share: float
    seconds: float = 0.0

    def took(self, seconds: float) -> None:
        self.seconds += UPKEEP_FOLLOW * (seconds - self.seconds)

    def steps(self, step: float) -> int:
        """Steps, of ``step`` seconds, until it may be done again."""
        return int(min(self.seconds / (self.share * step), LONGEST_WAIT))


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
        self._upkeep = Upkeep(LOOKING_SHARE)

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
        self._longest = min(self._upkeep.steps(step), LONGEST_REST)
        self._least = self._upkeep.seconds / step

    def _note(self, gain: float, steps: int) -> None:
        self._memory = min(self._memory + steps, MEMORY)
        self.gain += (1 - (1 - 1 / self._memory) ** steps) * (gain - self.gain)


def typical(seconds: Sequence[float]) -> float:
    """Mean of steps that are alike."""
    most = OUTLIER * median(seconds)
    return fmean(min(each, most) for each in seconds)
