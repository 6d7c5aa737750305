"""What a step of drafting and verifying costs, from what such steps have cost.

`StepCosts` predicts seconds. `Coverage` says how many distinct experts a pass visits, and how many
of them are missing; `Times` fits prices (of a pass, a row, an expert in memory, a missing one) and
keeps what passes that are alike have taken. It is MoESD's model with a measured curve of coverage
in place of uniform routing, and with cache misses. Legend: B sequences of a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Protocol

import numpy as np

from moe.speculate.draft import Mode, Round

Counts = tuple[float, float]
"""Distinct experts that a pass visited in all layers, and those of them not in memory."""
HITS_FOLLOW = 0.1
"""Weight of the last pass in what is known of hits: texts change what is in memory."""
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
JUDGED = 128
"""Predictions that are judged."""
LEARNING = 16
"""Steps before predictions are judged."""
TOGETHER = 8
"""Steps that are judged as one as well: what a single one has to fetch is luck."""
RECENT = 0.99
HOPE = 0.1
"""Least that a draft pass may cost beside a plain one."""
STEP_FOLLOW = 0.1
ROWS = 7
"""Of a sequence in a long draft."""
Features = tuple[float, float, float, float]
"""Of a pass: one, its rows, distinct experts, and those of them to be fetched."""
Depths = tuple[int, ...]
"""Tokens that each sequence drafts."""
Effort = tuple[Sequence[float], Sequence[float]]
"""Of each position of a plan the share of steps in which it is drafted, and verified."""


class StepCosts:
    """Predicts and learns.

    Args:
        sizes: of the experts.
        prices: assumed seconds of a pass for itself, a row, an expert in memory, one to be fetched;
            only the proportions matter.
        relative: of each mode that drafts with passes of the model, what a pass costs beside one
            that decodes plainly with every expert in memory.

    Attributes:
        efficiency: of verifying.
        errors: of predictions.
        overhead: seconds that a step with drafts takes beside the passes of the model.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        prices: tuple[float, float, float, float],
        relative: Mapping[Mode, float],
    ) -> None:
        pace = Pace()
        self.coverage = Coverage(sizes)
        self.efficiency = Efficiency()
        self.errors = Errors()
        self.overhead = 0.0
        self._relative = relative
        self._verify = Times(prices, pace)
        self._draft = {mode: Times((0.8, 0.2), pace) for mode in relative}
        self._known: dict[tuple[int, float], float] = {}  # by sequences and rows

    def verify(self, sequences: int, rows: float) -> float:
        """Seconds of the model's own pass over so many rows of so many sequences."""
        known = self._known.get((sequences, rows))
        if known is None:
            low = int(rows)
            known = self._verify_whole(sequences, low)
            if rows > low:
                known += (rows - low) * (self._verify_whole(sequences, low + 1) - known)
            self._known[sequences, rows] = known
        return known

    def follow(self, sequences: int, rows: int, counts: Counts | None, steps: int = 1) -> None:
        """What is in memory changes with the text; steps have missed so many experts."""
        if counts is not None:
            self.coverage.follow(sequences, rows, counts[1], steps)
            self._known.clear()

    def plainly(self, sequences: int, rows: int, counts: Counts | None) -> float:
        """Seconds of a plain step in place of one that has visited such experts."""
        if counts is None or self.coverage.sizes.resident == 1:
            return self.verify(sequences, sequences)
        distinct = self.coverage.distinct(sequences, sequences)
        missing = self.coverage.missing_instead(sequences, rows, counts[1])
        features = 1.0, float(sequences), distinct, missing
        return self._verify.predict(_point(sequences, sequences, features), features)

    def draft(self, mode: Mode, passes: float, rows: float, hopeful: bool = False) -> float:
        """Seconds of draft passes with so many rows; ``hopeful``: as few as may be, before any has
        been measured."""
        times = self._draft[mode]
        if passes == 0:
            return 0.0
        if times.known:
            point = round(passes), round(rows)
            return times.predict(point, (passes, rows))
        near = self._verify.modelled((1.0, 1.0, self.coverage.sizes.visits, 0.0))
        return (HOPE if hopeful else self._relative[mode]) * near * (0.8 * passes + 0.2 * rows)

    def row(self, sequences: int) -> float:
        """Seconds that a drafted row costs in the model's own pass, on average of a long draft:
        that and a plain pass are what is measured most."""
        plain, deep = (self.verify(sequences, each * sequences) for each in (1, ROWS))
        return max(deep - plain, 0.0) / ((ROWS - 1) * sequences)

    def step(
        self,
        mode: Mode | None,
        drafting: Sequence[bool],
        effort: Effort,
        hopeful: bool,
        depths: Depths,
    ) -> float:
        """Seconds of a step by the depths of its sequences.

        Args:
            mode: of those who draft with passes of the model.
            drafting: who they are; what the others draft costs nothing.
            effort: of that mode.
            hopeful: see `draft`.
        """
        drafted, verified = effort
        passes = draft_rows = 0.0
        rows = float(len(depths))
        counts: dict[int, int] = {}
        for depth, with_passes in zip(depths, drafting, strict=True):
            if with_passes:
                counts[depth] = counts.get(depth, 0) + 1
            else:
                rows += depth
        taking = sum(counts.values())
        for position in range(max(counts, default=0)):
            taking -= counts.get(position, 0)
            passes += min(taking * drafted[position], 1.0)
            draft_rows += taking * drafted[position]
            rows += taking * verified[position]
        seconds = self.verify(len(depths), rows)
        if mode is None:
            return seconds
        return seconds + self.draft(mode, passes, draft_rows, hopeful) + self.overhead

    def besides(self, seconds: float) -> None:
        """A step with drafts took so long beside the passes of the model."""
        self.overhead += STEP_FOLLOW * (seconds - self.overhead)

    def observe(self, mode: Mode | None, round: Round, counts: Counts | None) -> None:
        """A step without prompts is over.

        Args:
            counts: experts of all layers that it visited, and those of them that were not in
                memory; None where nobody counted.
        """
        sequences, rows = len(round.trials), round.rows
        passes, draft_rows = len(round.draft_rows), sum(round.draft_rows)
        seconds = round.verify_seconds
        predicted = self.verify(sequences, rows)
        if rows > sequences and self._verify.known:
            self.efficiency.add(self.verify(sequences, sequences), predicted, seconds)
        if mode is not None and passes:
            seconds += round.draft_seconds
            predicted += self.draft(mode, passes, draft_rows)
            point = (passes, draft_rows)
            self._draft[mode].observe(point, point, round.draft_seconds)
        self.errors.add(predicted, seconds)
        self._learn(sequences, rows, counts, round.verify_seconds, 1)

    def rested(self, sequences: int, seconds: float, counts: Counts | None, steps: int) -> None:
        """Plain steps are over that nobody planned; ``seconds`` is of one of them, on average, and
        ``counts`` of all together."""
        if self._verify.known and steps >= TOGETHER:
            self.errors.together(self.verify(sequences, sequences), seconds)
        if counts is not None:
            counts = counts[0] / steps, counts[1] / steps
            if counts[0] > 1.001 * sequences * self.coverage.sizes.visits:
                counts = None  # somebody else has been between them
        self.follow(sequences, sequences, counts, steps)
        self._learn(sequences, sequences, counts, seconds, steps)

    def _learn(
        self, sequences: int, rows: int, counts: Counts | None, seconds: float, steps: int
    ) -> None:
        features = self._features(sequences, rows)
        if counts is not None:
            self.coverage.observe(sequences, rows, counts[0])
            features = 1.0, float(rows), *counts
        self._verify.observe(_point(sequences, rows, features), features, seconds, steps)
        self._known.clear()

    def _verify_whole(self, sequences: int, rows: int) -> float:
        features = self._features(sequences, rows)
        return self._verify.predict(_point(sequences, rows, features), features)

    def _features(self, sequences: int, rows: float) -> Features:
        distinct = self.coverage.distinct(sequences, rows)
        return 1.0, float(rows), distinct, self.coverage.missing(sequences, rows)


def _point(sequences: int, rows: int, features: Features) -> object:
    """Passes with the same are alike."""
    return sequences, rows, int(features[-1]).bit_length()


class Counter(Protocol):
    """Counts the experts of a step."""

    def start(self) -> None: ...

    def read(self) -> Counts | None:
        """Since `start`; None where it does not know."""
        ...


@dataclass(frozen=True)
class ExpertSizes:
    """A model's experts.

    Attributes:
        experts: of all layers together.
        visits: of one token in all layers: the sum of K.
        slots: experts that are in memory; all of them without offload.
    """

    experts: int
    visits: float
    slots: int

    @property
    def resident(self) -> float:
        return min(self.slots / self.experts, 1.0)


class Coverage:
    """Distinct experts of a pass, and those of them that are not in memory.

    The rows of a pass are worth fewer independent ones, ``B^a * (rows / B)^b``: rows of different
    sequences, and neighbours in one, go to the same experts more often than chance would have it.
    Both exponents are fitted; then uniform routing's law holds.

    Attributes:
        exponents: a and b.
        hits: share of one token's experts that are in memory.
    """

    def __init__(self, sizes: ExpertSizes) -> None:
        self.sizes = sizes
        self.exponents = (0.9, 0.8)
        self.hits = sizes.resident
        self._share = min(sizes.visits / sizes.experts, 1 - 1e-9)
        self._gram = np.eye(2)
        self._moment = np.array(self.exponents)

    def independent(self, sequences: int, rows: float) -> float:
        """Rows of uniform routing that would visit as many experts."""
        a, b = self.exponents
        return sequences**a * (rows / sequences) ** b

    def distinct(self, sequences: int, rows: float) -> float:
        """Experts of all layers that a pass visits."""
        return self.sizes.experts * self._covered(self._share, self.independent(sequences, rows))

    def missing(self, sequences: int, rows: float) -> float:
        """Those of them that have to be fetched."""
        return self._missing(self.hits, self.independent(sequences, rows))

    def missing_instead(self, sequences: int, rows: int, missing: float) -> float:
        """Experts that one row of each sequence would have missed, where so many were missing."""
        if self.sizes.resident == 1:
            return 0.0
        hits = self._share_of_hits(self.independent(sequences, rows), missing)
        return self._missing(hits, self.independent(sequences, sequences))

    def follow(self, sequences: int, rows: int, missing: float, passes: int = 1) -> None:
        """So many experts of a pass, or of several on average, were not in memory."""
        if self.sizes.resident < 1:
            recent = 1 - (1 - HITS_FOLLOW) ** passes
            hits = self._share_of_hits(self.independent(sequences, rows), missing)
            self.hits += recent * (hits - self.hits)

    def observe(self, sequences: int, rows: int, distinct: float) -> None:
        """So many experts a pass, or several on average, really visited."""
        covered = min(distinct / self.sizes.experts, 1 - 1e-3)
        worth = log(1 - covered) / log(1 - self._share)
        if rows > 1 and worth > 0:
            x = np.array([log(sequences), log(rows / sequences)])
            self._gram = 0.98 * self._gram + np.outer(x, x) + 0.002 * np.eye(2)
            self._moment = 0.98 * self._moment + x * log(worth) + 0.002 * np.array(self.exponents)
            a, b = np.clip(np.linalg.solve(self._gram, self._moment), 0.05, 1.2).tolist()
            self.exponents = a, b

    def _missing(self, hits: float, worth: float) -> float:
        away = 1 - self.sizes.resident
        if away <= 0:
            return 0.0
        share = min((1 - hits) * self._share / away, 1 - 1e-9)
        return self.sizes.experts * away * self._covered(share, worth)

    def _share_of_hits(self, worth: float, missing: float) -> float:
        """The hit share at which so many would be missing."""
        away = 1 - self.sizes.resident
        covered = min(missing / (self.sizes.experts * away), 1 - 1e-9)
        lost = 1 - (1 - covered) ** (1 / max(worth, 1e-9))
        return min(max(1 - lost * away / self._share, 0.0), 1.0)

    @staticmethod
    def _covered(share: float, worth: float) -> float:
        return 1 - exp(worth * log(1 - share))


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
