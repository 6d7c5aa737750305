"""Probabilities learnt from trials that fade: texts change, and so does what is accepted."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import sqrt

KEEP = 0.98  # a trial counts half after 34 later ones at its position
FADE = 0.9995  # and half after 1400 steps in which nobody tried
FIRST = 0.35
"""Acceptance that is assumed of a mode that nobody has tried: too low to be chosen for itself."""
DOUBT = 2.0
"""Trials that the assumption weighs."""
FOLLOWS = 4.0
"""Trials that a position's likeness to the one before weighs."""
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
MOST = 0.99


class Share:
    """A probability from trials that fade: a Beta distribution around what is assumed at first."""

    def __init__(self) -> None:
        self.good = self.all = 0.0

    def add(self, good: float, keep: float = KEEP) -> None:
        self.good = keep * self.good + good
        self.all = keep * self.all + 1.0

    def mean(self, assumed: float, weight: float, fade: float = 1.0) -> float:
        return (fade * self.good + weight * assumed) / (fade * self.all + weight)


class PositionRates:
    """Acceptance of one mode by position, of which there are ``max_depth``."""

    def __init__(self, max_depth: int) -> None:
        self.success = [Share() for _ in range(max_depth)]
        self.drafted = [Share() for _ in range(max_depth)]
        self.verified = [Share() for _ in range(max_depth)]
        self.taken = [Share() for _ in range(max_depth)]
        self._tried_at = 0
        self._verified: list[float] | None = None
        self._known: dict[float, tuple[int, list[float]]] = {}

    def observe(self, step: int, planned: int, drafted: int, verified: int, accepted: int) -> None:
        """One sequence's draft of at most ``planned`` tokens.

        Args:
            drafted: tokens that there were before the unlikely ones were left out.

        A position that was not verified, although it was planned and all before it were accepted,
        counts as not accepted: what is learnt is what planning it brings.
        """
        if step != self._tried_at:
            self._fade(FADE ** (step - self._tried_at))
            self._tried_at = step
        self._verified = None
        for position in range(min(planned, len(self.success))):
            self.drafted[position].add(position < drafted)
            self.verified[position].add(position < verified)
            if position <= accepted:
                self.success[position].add(position < accepted)
                if position < verified:
                    self.taken[position].add(position < accepted)

    def rates(self, step: int, optimism: float = 0.0) -> list[float]:
        """Probability that each position is accepted if all before it were, as of this step.

        Args:
            step: now.
            optimism: standard deviations to add; untried positions then look good.
        """
        at, known = self._known.get(optimism, (-1, []))
        if at != step:
            known = self._rates(step, optimism)
            self._known[optimism] = step, known
        return known

    def verified_rates(self) -> list[float]:
        """The same of positions that are verified, which the less likely are not."""
        if self._verified is None:
            rates, assumed, weight = [], FIRST, DOUBT
            for share in self.taken:
                assumed = share.mean(assumed, weight)
                weight = FOLLOWS
                rates.append(assumed)
            self._verified = rates
        return self._verified

    def _fade(self, fade: float) -> None:
        for shares in (self.success, self.drafted, self.verified, self.taken):
            for share in shares:
                share.good *= fade
                share.all *= fade

    def _rates(self, step: int, optimism: float) -> list[float]:
        fade, assumed, weight = FADE ** (step - self._tried_at), FIRST, DOUBT
        rates = []
        for share in self.success:
            mean = share.mean(assumed, weight, fade)
            spread = sqrt(mean * (1 - mean) / (fade * share.all + weight + 1))
            rates.append(min(mean + optimism * spread, MOST))
            assumed, weight = mean, FOLLOWS
        return rates

    def effort(self) -> tuple[list[float], list[float]]:
        """Of each position the share of plans in which it was drafted, and verified."""
        drafted, verified = (
            [share.mean(1.0, 1.0) for share in shares] for shares in (self.drafted, self.verified)
        )
        return drafted, verified


class Calibration:
    """From a draft's own probability of a token to the probability that it is accepted."""

    def __init__(self) -> None:
        self._bins = [Share() for _ in range(len(EDGES) + 1)]

    def observe(self, confidence: float, accepted: bool) -> None:
        self._bins[bisect(EDGES, confidence)].add(accepted, 0.995)

    def probabilities(self, confidence: Sequence[float], rates: Sequence[float]) -> list[float]:
        """
        Args:
            confidence: of the draft, for each token.
            rates: acceptance at each position whatever the confidence.
        """
        bins = [self._bins[bisect(EDGES, each)] for each in confidence]
        return [
            own.mean((each + rate) / 2, FOLLOWS)
            for own, each, rate in zip(bins, confidence, rates, strict=False)
        ]
