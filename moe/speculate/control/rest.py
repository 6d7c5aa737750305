"""When not to look for drafts at all: where steps, all told, take longer than plain ones.

Looking and learning take time of their own, which predictions of passes leave out; on a small model
that is a tenth of a step. So now and then nobody looks, for as long as looking has lost, and such
steps are the measure of all others.
"""

from __future__ import annotations

FIRST = 4
"""Plain steps before looking begins with a new number of sequences."""
PATIENCE = 3.0
"""Plain steps' time that looking may lose before it pauses."""
CREDIT = 8.0
"""And the most that earlier gains allow it to lose beyond."""
SHORTEST, GROWTH, LONGEST = 16, 3, 512
"""Steps of a rest; each is so much longer than the last one, until looking gains again."""
AGAIN = 256
"""Steps of looking after which plain ones are measured again."""
FOLLOW = 0.1
OUTLIER = 3.0
"""Plain steps that a step may count for."""


class Rest:
    """Decides from the times of whole steps."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step by its sequences
        self._left = self._length = self._looked = 0
        self._lost = 0.0  # plain steps

    def begins(self, batch: int) -> bool:
        """A step of so many sequences begins; whether nobody looks for drafts in it."""
        if self._left == 0 and batch not in self._plain:
            self._left = FIRST
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def ends(self, batch: int, tokens: int, seconds: float, rested: bool) -> None:
        """It took so long, drafts and learning and all, and brought so many tokens."""
        known = self._plain.get(batch)
        if rested:
            known = seconds if known is None else known
            seconds = min(seconds, OUTLIER * known)
            self._plain[batch] = known + FOLLOW * (seconds - known)
            return
        assert known is not None, "the first steps of a batch are plain"
        self._looked += 1
        self._lost += min(seconds / known, OUTLIER) - tokens / batch
        if self._lost < -CREDIT:
            self._lost, self._length = -CREDIT, 0
        if self._lost > PATIENCE:
            self._length = min(max(GROWTH * self._length, SHORTEST), LONGEST)
            self._left, self._looked, self._lost = self._length, 0, 0.0
        elif self._looked % AGAIN == 0:
            self._left = FIRST
