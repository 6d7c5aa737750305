"""Bounds what drafting may lose, and decides when to look for drafts at all.

`Account` charges every step that is not plain decoding with its whole time, and credits it with
what its tokens would have taken plainly. The controller takes no step that could lose more than
there is room for if no draft of it were accepted. So in any stretch of time drafting loses at most
`SHARE` of it, `CREDIT` plain steps and `TRUST`; from the beginning on, at most `SHARE`, `UNSPENT`
steps and `TRUST`.

`Looking` chooses how many plain steps pass without a lookup of model-free drafts: a few at first,
to measure what they take, and longer and longer rests where lookups have gained nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from moe.speculate.step_times import OUTLIER

SHARE = 0.01
"""Share of all time that may be lost to finding out whether drafts pay, and how."""
UNSPENT = 4.0
"""Plain steps' time to which that share adds up at most. The account also begins with it: drafts
that are good from the first tokens on would otherwise be missed for hundreds of steps."""
CREDIT = 24.0
"""Plain steps' time of earlier gains that may be lost again. Drafts that double the speed fail
several times in a row now and then; a controller that gave them up then would need hundreds of
steps to begin anew."""
TRUST = 12.0
"""Plain steps' time that model-free drafts may lose beyond the room: their chances were counted on
tokens that came anyway, so a few failures in a row are bad luck."""
TRYING = 0.005
"""Share of all time that trials of elastic drafts may lose."""
RECENT = 0.998
"""Weight of a step in the gain after the next one."""

FIRST = 8
"""Plain steps before the first lookup with a new number of sequences."""
EVERY, BURST = 128, 2
"""After this many steps with drafts and none without, this many plain ones are measured again."""
HOPE, HELD, MEMORY = 0.18, 16, 64
"""Plain steps that a lookup is assumed to gain at first; the steps that this counts for; the steps
that are remembered."""
LOOKING_SHARE, LONGEST_REST = 0.005, 128
"""Share of the time that lookups may take where they do not pay; most steps between two of them."""
FOLLOW = 0.2
"""Weight of the last lookup in what a lookup takes."""


class Account:
    """Seconds that may be lost.

    Attributes:
        room: seconds that may be lost now; below 0 if more has been lost.
        trials: trials of elastic drafts so far.
    """

    def __init__(self) -> None:
        self.room, self.trials = 0.0, 0
        self._trying = 0.0  # seconds that trials may lose
        self._recent = self._saved = self._foreseen = 0.0  # fading

    @property
    def gain(self) -> float:
        """Time that plain decoding would have taken lately over the time that was taken."""
        return 1.0 + self._saved / self._recent if self._recent else 1.0

    @property
    def predicted_gain(self) -> float | None:
        """The same as foreseen when steps were chosen; None before the first step."""
        return 1.0 + self._foreseen / self._recent if self._recent else None

    def affords(self, loss: float, trust: float = 0.0) -> bool:
        """Return whether this many seconds may be lost, ``trust`` of them beyond the room."""
        return loss <= self.room + trust

    def affords_trial(self, loss: float) -> bool:
        """Return whether a trial may lose this many seconds, whatever has been gained."""
        return loss <= self._trying

    def tried(self, loss: float) -> None:
        """A trial has lost this many seconds, or gained if below 0."""
        self.trials += 1
        self._trying -= max(loss, 0.0)

    def earn(self, seconds: float, step: float) -> None:
        """Plain decoding took so long, one step of it ``step`` seconds."""
        if not self._recent:
            self.room = UNSPENT * step
        self.room = max(self.room, min(self.room + SHARE * seconds, UNSPENT * step))
        self._pass(seconds, step)

    def settle(self, seconds: float, plain: float, step: float, foreseen: float = 0.0) -> None:
        """A step with drafts, or lookups, took so long; ``plain`` seconds of plain decoding would
        have made as many tokens, and ``foreseen`` seconds were to be saved."""
        self.room = min(self.room + SHARE * seconds + plain - seconds, CREDIT * step)
        self._pass(seconds, step)
        self._saved = RECENT * self._saved + plain - seconds
        self._foreseen = RECENT * self._foreseen + foreseen

    def _pass(self, seconds: float, step: float) -> None:
        self._recent = RECENT * self._recent + seconds
        self._trying = min(self._trying + TRYING * seconds, UNSPENT * step)


class Looking:
    """Mean gain of steps that look drafts up, everything included, and rests between them.

    Attributes:
        gain: of such a step, in plain steps.
    """

    def __init__(self) -> None:
        self.gain = HOPE
        self._known = set[int]()  # numbers of sequences
        self._drafted = self._left = self._rest = self._longest = 0
        self._memory = HELD
        self._seconds = self._least = 0.0  # what a lookup takes; the same in plain steps

    def rests(self, batch: int) -> int:
        """Plain steps to come without a lookup; 0 if the next step begins with one."""
        if batch not in self._known:
            self._known.add(batch)
            return FIRST
        if self._drafted >= EVERY:
            self._drafted = 0
            return BURST
        left, self._left = self._left, 0
        return left

    def found(self, gain: float) -> None:
        """Drafts were made and gained this many plain steps: rests end if that is above 0."""
        self._drafted += 1
        self._note(gain, 1)
        if gain > 0:
            self._rest = self._left = 0
        else:
            self.missed()

    def missed(self) -> None:
        """Nothing was drafted, or in vain. Where lookups do not gain what they take, each rest is
        twice as long as the one before, until they take their share of the time."""
        if self.gain <= self._least:
            self._left = self._rest = min(2 * self._rest + 1, self._longest)

    def plainly(self, step: float, looks: int, looking: float) -> None:
        """Plain steps are over, of ``step`` seconds each; lookups before ``looks`` of them took
        ``looking`` seconds in all."""
        self._drafted = 0
        if looks:
            self._note(-looking / looks / step, looks)
            self._seconds += FOLLOW * (looking / looks - self._seconds)
        self._least = self._seconds / step
        self._longest = min(int(self._least / LOOKING_SHARE), LONGEST_REST)

    def _note(self, gain: float, steps: int) -> None:
        self._memory = min(self._memory + steps, MEMORY)
        self.gain += (1 - (1 - 1 / self._memory) ** steps) * (gain - self.gain)


def typical(seconds: Sequence[float]) -> float:
    """Mean of steps that are alike, each cut at `OUTLIER` medians."""
    most = OUTLIER * median(seconds)
    return fmean(min(each, most) for each in seconds)
