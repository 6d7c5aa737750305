"""What a step of drafting and verifying costs, from what such steps have cost.

MoESD's model with a measured curve of coverage in place of uniform routing, and
with cache misses: more rows read more experts, and those that are not in memory cost most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe.speculate.control.coverage import Counts, Coverage, Sizes
from moe.speculate.control.goodput import Depths
from moe.speculate.control.measured import TOGETHER, Efficiency, Errors
from moe.speculate.control.times import Pace, Times
from moe.speculate.draft import Mode, Round

HOPE = 0.1
"""Least that a draft pass may cost beside a plain one."""
FOLLOW = 0.1
ROWS = 7
"""Of a sequence in a long draft."""

Features = tuple[float, float, float, float]
"""Of a pass: one, its rows, distinct experts, and those of them to be fetched."""
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
        sizes: Sizes,
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
        self.overhead += FOLLOW * (seconds - self.overhead)

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
