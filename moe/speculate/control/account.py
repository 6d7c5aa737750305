"""What drafting may still lose: a small share of the time, and a little of what it has gained.

Everything that is not plain decoding is charged with its whole time, looking for drafts and
learning included, and credited with what its tokens would have taken plainly. A step that could
lose more than there is room for, if no draft of it were accepted, is not taken. So in any stretch
of time no more is lost than the share of it, `CREDIT` plain steps and what was lent (`LENT`), and
from the beginning on no more than the share, `UNSPENT` steps and what was lent.
"""

from __future__ import annotations

from math import ceil

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
LENT = 16.0
"""Plain steps' time that may be lost beside that on the word of drafts that cost nothing: what they
would have gained on tokens that came anyway is lent, until real gains have paid it back."""
REST = 3.0
"""Plain steps' time that there has to be room for after there was none: to look, and to draft."""
RECENT = 0.998


class Account:
    """Seconds that may be lost.

    Attributes:
        room: that may be lost now against plain decoding; below 0 where more has been lost.
        trials: made of what is not the best that is known.
    """

    def __init__(self) -> None:
        self.room, self.trials = 0.0, 0
        self._poor = False  # there was no room, and is too little yet
        self._trying = 0.0  # seconds that trials may lose against the best that is known
        self._recent = self._saved = self._lent = 0.0

    @property
    def gain(self) -> float:
        """Time that plain decoding would have taken of late over the time that was taken."""
        return 1.0 + self._saved / self._recent if self._recent else 1.0

    def affords(self, loss: float) -> bool:
        """Whether so many seconds may be lost."""
        return loss <= self.room

    def steps_until(self, room: float, step: float) -> int:
        """Plain steps, of ``step`` seconds, until there is room for so many of them to be lost."""
        return ceil(max(room - self.room / step, 0.0) / SHARE)

    def recovers(self, step: float) -> int:
        """Plain steps, of ``step`` seconds, until there is room again where there was none."""
        self._poor = self._poor or self.room < 0
        left = self.steps_until(REST, step) if self._poor else 0
        self._poor = left > 0
        return left

    def affords_trial(self, loss: float) -> bool:
        """Whether a trial may lose so many seconds, against the best that is known, too."""
        return loss <= self._trying

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

    def promise(self, seconds: float, step: float) -> None:
        """Drafts that nobody verified would have saved so many seconds."""
        loan = min(seconds, LENT * step - self._lent, CREDIT * step - self.room)
        if loan > 0:
            self.room += loan
            self._lent += loan

    def settle(self, seconds: float, plain: float, step: float) -> None:
        """Something else took so long, and ``plain`` seconds would have brought as many tokens."""
        self.room = min(self.room + SHARE * seconds + plain - seconds, CREDIT * step)
        self._lent = max(self._lent - max(plain - seconds, 0.0), 0.0)
        self._pass(seconds, step)
        self._saved = RECENT * self._saved + plain - seconds

    def _pass(self, seconds: float, step: float) -> None:
        self._recent = RECENT * self._recent + seconds
        self._trying = min(self._trying + TRYING * seconds, UNSPENT * step)
