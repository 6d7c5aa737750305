"""Whether steps run in halves (`moe.engine.halves`): measured, as it often does not pay.

Where links are fast, or few tokens share each expert, two halves cost more than they hide: each
reads the experts that both need.
"""

from __future__ import annotations

from statistics import median
from typing import Any

TRIALS = 6
"""Steps of each way that are compared; as many steps again and again later."""
AGAIN = 400
"""Steps of the better way before the other is tried again."""
GAIN = 0.97
"""Two halves must take at most this share of the time of a whole step."""


class Overlap:
    """Decides for all ranks whether the next step runs in halves; rank 0 asks and tells the others.

    Args:
        mode: `on`, `off` or `auto`: both ways are tried on steps of a like size, and the faster one
            is kept.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._sizes: dict[int, _Trial] = {}
        self._asked: _Trial | None = None

    def choose(self, rows: int | None) -> bool:
        """Whether a step of so many rows on all ranks together runs in halves; None: steps like
        this one take too different times to be compared."""
        self._asked = None
        if self._mode != "auto" or rows is None:
            return self._mode == "on"
        self._asked = self._sizes.setdefault(rows.bit_length(), _Trial())
        return self._asked.choose()

    def observe(self, seconds: float) -> None:
        """How long that step took."""
        if self._asked is not None:
            self._asked.observe(seconds)

    def as_dict(self) -> dict[str, Any]:
        """What was found for steps of up to so many rows, for JSON."""
        found = {str(2**bits - 1): trial.verdict for bits, trial in sorted(self._sizes.items())}
        return {"mode": self._mode, "halves_take": found}


class _Trial:
    """Steps of a like size."""

    def __init__(self) -> None:
        self.verdict: float | None = None
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._halves, self._left = False, 0

    def choose(self) -> bool:
        if self._left == 0 and self.verdict is None:
            whole, halves = map(len, (self._seconds[False], self._seconds[True]))
            self._halves = halves < whole
        return self._halves

    def observe(self, seconds: float) -> None:
        if self.verdict is not None:
            self._left -= 1
            if self._left == 0:
                self.verdict = None
            return
        self._seconds[self._halves].append(seconds)
        if all(len(taken) >= TRIALS for taken in self._seconds.values()):
            self.verdict = median(self._seconds[True]) / median(self._seconds[False])
            self._halves, self._left = self.verdict <= GAIN, AGAIN
            self._seconds = {False: [], True: []}
