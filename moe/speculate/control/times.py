"""What passes take: seconds from prices of what they do, fitted while they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

STIFFNESS = 0.02
"""How hard fitted prices are held to the proportions that were assumed, in bucket weights."""
BELIEF = 2.0
"""Measurements of a point that weigh as much as the fitted model there."""
POINTS = 64
"""Different points that are remembered."""
MOST_COUNT = 16
RECENT = 0.99
FOLLOW = 0.06
"""Weight of the last measurement in the machine's pace."""
OUTLIER = 1.5
"""Factor by which a time may differ from what was known without being cut."""


@dataclass
class Pace:
    """How much slower the machine is now than when it was measured: it has other work, too."""

    value: float = 1.0

    def follow(self, ratio: float) -> None:
        """A pass took ``ratio`` times what was known of such passes."""
        self.value *= ratio**FOLLOW


@dataclass
class _Point:
    """What was measured of passes that are alike; seconds at pace 1."""

    features: np.ndarray
    seconds: float
    count: float = 1.0
    used: int = 0


@dataclass
class Times:
    """Seconds of passes, from features that each have a price.

    Args:
        assumed: prices, of which only the proportions are believed: the first measurement says how
            fast the machine is.
        pace: of the machine, shared by everything that runs on it.

    Points that have been measured often are known by themselves; the prices, fitted to all points
    by ridge regression, say what lies between and beyond.
    """

    assumed: Sequence[float]
    pace: Pace = field(default_factory=Pace)
    prices: list[float] = field(init=False)
    _points: dict[object, _Point] = field(default_factory=dict)
    _clock: int = 0
    _stale: int = 0

    def __post_init__(self) -> None:
        self.prices = list(self.assumed)

    @property
    def known(self) -> bool:
        return bool(self._points)

    def modelled(self, features: Sequence[float]) -> float:
        """By prices alone."""
        prices = zip(self.prices, features, strict=True)
        return self.pace.value * sum(price * feature for price, feature in prices)

    def predict(self, point: object, features: Sequence[float]) -> float:
        """By prices, and by what was measured there."""
        modelled, known = self.modelled(features), self._points.get(point)
        if known is None:
            return modelled
        measured = self.pace.value * known.seconds
        return (known.count * measured + BELIEF * modelled) / (known.count + BELIEF)

    def observe(self, point: object, features: Sequence[float], seconds: float) -> None:
        """A pass has been measured."""
        self._clock += 1
        row, known = np.asarray(features, dtype=float), self._points.get(point)
        seconds /= self.pace.value
        if known is None:
            if len(self._points) >= POINTS:
                del self._points[min(self._points, key=lambda key: self._points[key].used)]
            self._points[point] = _Point(row, seconds, used=self._clock)
            self._fit()
            return
        if known.count > 3:
            seconds = min(max(seconds, known.seconds / OUTLIER), known.seconds * OUTLIER)
            self.pace.follow(seconds / known.seconds)
        known.count = min(known.count + 1, MOST_COUNT)
        known.features = known.features + (row - known.features) / known.count
        known.seconds += (seconds - known.seconds) / known.count
        known.used = self._clock
        self._stale += 1
        if known.count < 4 or self._stale >= 16:
            self._fit()

    def _fit(self) -> None:
        """Least squares of relative errors, held to the assumed proportions, no price below 0."""
        self._stale = 0
        points = list(self._points.values())
        assumed = np.array(self.assumed, dtype=float)
        rows = np.stack([p.features / p.seconds for p in points])
        weight = np.array([min(p.count, 8.0) / 8.0 for p in points])
        fit = rows @ assumed
        scale = float((weight * fit).sum() / (weight * fit**2).sum())
        columns = rows * (scale * assumed)  # prices in units of the assumed ones
        gram = (columns * weight[:, None]).T @ columns + STIFFNESS * np.eye(len(assumed))
        moment = (columns * weight[:, None]).sum(0) + STIFFNESS
        used = np.ones(len(assumed), dtype=bool)
        solved = np.zeros(len(assumed))
        while used.any():
            solved[:] = 0.0
            solved[used] = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
            if (solved >= 0).all():
                break
            used &= solved > 0
        self.prices = (solved * scale * assumed).tolist()


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
