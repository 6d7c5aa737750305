"""Predicts how long decoding steps take, from the steps measured so far.

A plain step of B sequences takes what plain steps of B have taken on average. A step that also
verifies drafts of ``x`` tokens a sequence takes ``1 + start + slope x`` times as long: a line that
is fitted to the measurements of each B by least squares, in which older ones fade. Misses of an
expert cache are part of what is averaged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

ENDS = 1.0, 6.0
"""Tokens a sequence at which the line is assumed, with the weight of `BELIEF` measurements each."""
BELIEF = 4.0
KEEP = 1 - 1 / 32
"""Weight of a measurement when the next one of its kind comes."""
OUTLIER = 2.0
"""Times its expected seconds that a step may count for: other work interrupts some steps."""
JUDGED = 128
"""The last predictions whose errors are kept."""
UNJUDGED = 16
"""First predictions whose errors are not counted."""


class Line(NamedTuple):
    """The time of verifying drafts, in plain steps: for itself, and for each token a sequence."""

    start: float
    slope: float


ASSUMED = Line(0.0, 0.2)
"""The line before any draft has been verified."""


@dataclass
class BatchTimes:
    """Steps of one number of sequences.

    Attributes:
        assumed: the line before anything is measured.
        plain: seconds of a plain step.
        line: fitted.
    """

    assumed: Line
    plain: float = 0.0
    line: Line = field(init=False)
    _plain_steps: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # 1, x, x x, y, x y

    def __post_init__(self) -> None:
        self.line = self.assumed

    def verify(self, x: float) -> float:
        """Seconds of a step with drafts of ``x`` tokens a sequence."""
        return self.plain * (1 + self.line.start + self.line.slope * x)

    def add_plain(self, seconds: float, steps: int) -> None:
        """Plain steps took so long on average."""
        limit = 1 / (1 - KEEP)
        self._plain_steps = min(self._plain_steps + steps, max(limit, steps))
        self.plain += steps / self._plain_steps * (seconds - self.plain)

    def add(self, x: float, seconds: float) -> None:
        """A step with drafts of ``x`` tokens a sequence took so long."""
        y = min(seconds, OUTLIER * self.verify(x)) / self.plain - 1
        new = 1.0, x, x * x, y, x * y
        self._sums = [KEEP * old + each for old, each in zip(self._sums, new, strict=True)]
        start, slope = self.assumed
        n, sx, sxx, sy, sxy = self._sums
        for x in ENDS:
            y = start + slope * x
            n, sx, sxx = n + BELIEF, sx + BELIEF * x, sxx + BELIEF * x * x
            sy, sxy = sy + BELIEF * y, sxy + BELIEF * x * y
        slope = max((n * sxy - sx * sy) / (n * sxx - sx * sx), 0.0)
        self.line = Line((sy - slope * sx) / n, slope)


class StepTimes:
    """Times of decoding steps by their sequences and rows."""

    def __init__(self) -> None:
        self._batches: dict[int, BatchTimes] = {}
        self._last = ASSUMED  # the line last fitted: what is assumed of other batch sizes
        self._errors = deque[float](maxlen=JUDGED)
        self._unjudged = UNJUDGED
        self._plain = self._predicted = self._measured = 0.0  # seconds of verifying steps, fading

    def plain(self, batch: int) -> float:
        """Seconds of a plain step; 0 if none of this many sequences has been measured."""
        known = self._batches.get(batch)
        return 0.0 if known is None else known.plain

    def verify(self, batch: int, rows: int) -> float:
        """Seconds of a step that reads this many rows, one of each sequence and drafted ones."""
        known = self._batches[batch]
        return known.verify((rows - batch) / batch) if rows > batch else known.plain

    def line(self, batch: int) -> Line:
        """Return the time of verifying drafts of this many sequences."""
        return self._batches[batch].line

    def add_plain(self, batch: int, seconds: float, steps: int) -> None:
        """Plain steps took so long on average."""
        if batch not in self._batches:
            self._batches[batch] = BatchTimes(self._last)
        self._batches[batch].add_plain(seconds, steps)

    def add(self, batch: int, rows: int, seconds: float) -> None:
        """A step with drafted rows took so long."""
        known, predicted = self._batches[batch], self.verify(batch, rows)
        if self._unjudged:
            self._unjudged -= 1
        else:
            self._errors.append(abs(predicted / seconds - 1))
        sums = self._plain, self._predicted, self._measured
        new = known.plain, predicted, seconds
        self._plain, self._predicted, self._measured = (
            0.99 * old + each for old, each in zip(sums, new, strict=True)
        )
        known.add((rows - batch) / batch, seconds)
        self._last = known.line

    def figures(self) -> dict[str, Any]:
        """Return how good predictions have been lately, for JSON; None before any. The target
        efficiency is MoESD's: the time of a plain step over that of one that verifies."""
        seen = self._measured > 0
        return {
            "target_efficiency": {
                "predicted": self._plain / self._predicted if seen else None,
                "measured": self._plain / self._measured if seen else None,
            },
            "prediction_error": median(self._errors) if self._errors else None,
        }
