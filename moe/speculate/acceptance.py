"""How likely drafted tokens are to be accepted, learned from what became of earlier ones.

`Acceptance` keeps, for each mode that drafts with passes of the model, an estimate for every
position (given that all positions before were accepted), a factor for every sequence, and a table
from the draft's own confidence to a probability (SpecDec++'s stopping rule without its trained
head). Older trials count less. Model-free drafts state their chances themselves
(`moe.speculate.ngram`).
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import sqrt
from operator import mul
from weakref import WeakKeyDictionary

from moe.speculate.draft import Mode

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
RECENT = 0.95
HOPE = 0.6
"""Probability of a drafted token before any has been seen."""
SEEN = 32
"""Drafted tokens whose probabilities are remembered."""
TYPICAL = 6.0
"""Trials that a sequence's likeness to the others weighs."""


class Acceptance:
    """Everything that is known of acceptance.

    Args:
        modes: ways of drafting.
        max_depth: most tokens of a draft.

    Attributes:
        step: now; of trials, the older count less.
    """

    def __init__(self, modes: Sequence[Mode], max_depth: int) -> None:
        self.step = 0
        self.positions = {mode: PositionRates(max_depth) for mode in modes}
        self._calibrated = {mode: Calibration() for mode in modes}
        self._drafted = {mode: deque[float](maxlen=SEEN) for mode in modes}
        self._sequences: WeakKeyDictionary[Hashable, list[float]] = WeakKeyDictionary()

    def observe(
        self,
        sequence: Hashable,
        mode: Mode,
        planned: int,
        confidence: Sequence[float],
        verified: int,
        accepted: int,
    ) -> None:
        """What became of one sequence's draft; ``confidence`` is that of every drafted token."""
        rates = self.positions[mode].verified_rates()
        own = self._sequences.setdefault(sequence, [0.0, 0.0])
        for position in range(min(accepted + 1, verified)):
            good = position < accepted
            own[0] = RECENT * own[0] + good
            own[1] = RECENT * own[1] + rates[position]
            if position < len(confidence):
                self._calibrated[mode].observe(confidence[position], good)
        self._drafted[mode] += self._probabilities(mode, confidence)
        drafted = max(len(confidence), verified)
        self.positions[mode].observe(self.step, planned, drafted, verified, accepted)

    def factor(self, sequence: Hashable) -> float:
        """How much better than the mean this sequence's drafts have done of late."""
        good, expected = self._sequences.get(sequence, (0.0, 0.0))
        return (good + TYPICAL) / (expected + TYPICAL)

    def worth(self, mode: Mode, survival: float, price: float) -> float:
        """Tokens that another drafted one brings, before its confidence is known.

        Args:
            survival: probability that all before it are accepted.
            price: of verifying it, in tokens; where it turns out not to be worth that, it is left.
        """
        seen = self._drafted[mode] or [HOPE]
        return sum(max(0.0, survival * each - price) for each in seen) / len(seen)

    def planned(self, sequence: Hashable, mode: Mode, optimism: float = 0.0) -> list[float]:
        """Probability of each position that it is accepted with all before it, if it is planned."""
        rates = self.positions[mode].rates(self.step, optimism)
        return _products(rates, self.factor(sequence))

    def drafted(self, mode: Mode, confidence: Sequence[float]) -> list[float]:
        """The same of tokens that have been drafted, with such confidence."""
        return _products(self._probabilities(mode, confidence), 1.0)

    def _probabilities(self, mode: Mode, confidence: Sequence[float]) -> list[float]:
        """Of each token, that it is accepted if all before it are."""
        known = self.positions[mode].verified_rates()
        return self._calibrated[mode].probabilities(confidence, known)


def _products(rates: Sequence[float], factor: float) -> list[float]:
    return list(accumulate((min(rate * factor, MOST) for rate in rates), mul))


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
