"""How steps that were measured compare with what was predicted of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

JUDGED = 128
"""Predictions that are judged."""
LEARNING = 16
"""Steps before predictions are judged."""
TOGETHER = 8
"""Steps that are judged as one as well: what a single one has to fetch is luck."""
RECENT = 0.99


class Errors:
    """How far predictions have been off."""

    def __init__(self) -> None:
        self._single = deque[float](maxlen=JUDGED)
        self._together = deque[float](maxlen=JUDGED)
        self._steps, self._predicted, self._seconds = 0, 0.0, 0.0

    def add(self, predicted: float, seconds: float) -> None:
        """Of one step."""
        self._steps += 1
        if self._steps <= LEARNING:
            return
        self._single.append(abs(predicted / seconds - 1))
        self._predicted, self._seconds = self._predicted + predicted, self._seconds + seconds
        if self._steps % TOGETHER == 0:
            self.together(self._predicted, self._seconds)
            self._predicted = self._seconds = 0.0

    def together(self, predicted: float, seconds: float) -> None:
        """Of several steps."""
        self._together.append(abs(predicted / seconds - 1))

    def medians(self) -> dict[str, float | None]:
        """Relative errors of late, of single steps and of a few together, for JSON: medians, as
        other work on the machine comes in bursts; None before any."""
        return {
            name: median(errors) if errors else None
            for name, errors in (("step", self._single), ("together", self._together))
        }


@dataclass
class Efficiency:
    """MoESD's target efficiency of late: a plain pass over one that verifies, in time.

    Attributes:
        plain, predicted, measured: seconds, fading.
    """

    plain: float = 0.0
    predicted: float = 0.0
    measured: float = 0.0

    def add(self, plain: float, predicted: float, measured: float) -> None:
        self.plain = RECENT * self.plain + plain
        self.predicted = RECENT * self.predicted + predicted
        self.measured = RECENT * self.measured + measured

    def as_dict(self) -> dict[str, float | None]:
        """For JSON; None before anything was verified."""
        if not self.measured:
            return {"predicted": None, "measured": None}
        return {
            "predicted": self.plain / self.predicted,
            "measured": self.plain / self.measured,
        }
