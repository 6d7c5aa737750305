"""How likely the tokens of a draft are to be accepted, learnt from what became of earlier ones.

Of each mode that drafts with passes of the model there is one estimate a position (given that all
positions before were accepted), one factor a sequence, and one table that turns the draft's own
confidence into a probability (SpecDec++'s stopping rule without its trained head). Model-free
drafts know their chances themselves (`moe.speculate.ngram`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from moe.speculate.control.rates import MOST, Calibration, PositionRates
from moe.speculate.draft import Mode

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
