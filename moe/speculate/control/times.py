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
MOST_COUNT = 32
FOLLOW = 0.06
"""Weight of the last measurement in the machine's pace."""
OUTLIER = 1.5
"""Factor by which a time may differ from what was known without being cut."""


@dataclass
class Pace:
    """How much slower the machine is now than when it was measured: it has other work, too."""

    value: float = 1.0

    def follow(self, ratio: float, passes: int = 1) -> None:
        """Passes took ``ratio`` times what was known of such passes."""
        self.value *= ratio ** (1 - (1 - FOLLOW) ** passes)


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

    Prices are fitted to all points by ridge regression. By how much passes like one have been
    slower than prices say is remembered too, where they have been measured often; what differs
    between passes that are alike, as what they have to fetch does, counts by its price.
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
        """By prices, and by what was measured of passes that are alike."""
        return self.modelled(features) * self._ratio(self._points.get(point))

    def observe(
        self, point: object, features: Sequence[float], seconds: float, passes: int = 1
    ) -> None:
        """Passes that are alike have been measured, or their mean."""
        self._clock += 1
        row, known = np.asarray(features, dtype=float), self._points.get(point)
        if known is None:
            if len(self._points) >= POINTS:
                del self._points[min(self._points, key=lambda key: self._points[key].used)]
            self._points[point] = _Point(row, seconds / self.pace.value, passes, self._clock)
            self._fit()
            return
        if known.count > 3:
            expected = self.predict(point, features)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            self.pace.follow(seconds / expected, passes)
        known.count = min(known.count + passes, MOST_COUNT)
        weight = min(passes / known.count, 1.0)
        known.features = known.features + weight * (row - known.features)
        known.seconds += weight * (seconds / self.pace.value - known.seconds)
        known.used = self._clock
        self._stale += 1
        if known.count < 4 or self._stale >= 16:
            self._fit()

    def _ratio(self, known: _Point | None) -> float:
        """By how much what is known of a point differs from what prices say of it."""
        if known is None:
            return 1.0
        modelled = self.modelled(known.features.tolist()) / self.pace.value
        return (known.count * known.seconds / modelled + BELIEF) / (known.count + BELIEF)

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
