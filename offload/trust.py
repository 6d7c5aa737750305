"""How much a forecast is to be believed of experts that are absent.

Who is in memory is mostly who is asked for often, so a guess that names an absent expert is wrong
more often than a guess: probabilities that hold for all experts do not hold for those that a bid
can be made on. A logistic regression on what was said and on how often the expert is asked for,
learnt on the way from every absent expert that was named, whether it was bid on or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEARNING_RATE = 0.05
HALF_LIFE = 200.0
"""Visits of a layer after which one counts half for how often an expert is asked for."""
KEEP = 0.5 ** (1 / HALF_LIFE)
RARELY = 0.05
"""How often, before anything has been seen."""


class Said(NamedTuple):
    """Log odds of a forecast, and of how often its expert is asked for, less their usual values."""

    stated: float
    usual: float


class Trust:
    """Of the forecasts for all layers.

    Args:
        experts: E of each MoE layer.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        # Of each expert its rate when it was asked for last, and at which visit of its layer.
        self._rates = [[(RARELY, 0)] * count for count in experts]
        self._visits = [0] * len(experts)
        self._weights = [0.0, 1.0, 0.0]  # as stated
        self._said: list[dict[int, Said]] = [{} for _ in experts]

    def forget(self) -> None:
        """What was said of layers that were never reached."""
        for said in self._said:
            said.clear()

    def chance(self, layer: int, expert: int, stated: float) -> float:
        """Probability that an absent expert, named with a probability, will be asked for."""
        said = Said(_log_odds(stated), _log_odds(self._rate(layer, expert)) - USUAL)
        self._said[layer][expert] = said
        return self._believed(said)

    def visit(self, layer: int, wanted: Sequence[int]) -> None:
        """A layer asks for experts: who was right about it?"""
        asked = set(wanted)
        offset, stated, usual = self._weights
        for expert, said in self._said[layer].items():
            error = LEARNING_RATE * ((expert in asked) - self._believed(said))
            offset += error
            stated += error * said.stated
            usual += error * said.usual
        # Within bounds, so that a predictor that was wrong for long can be believed again soon.
        self._weights = [
            min(max(offset, -2.0), 2.0),
            min(max(stated, 0.25), 2.0),
            min(max(usual, 0.0), 2.0),
        ]
        self._said[layer].clear()
        self._visits[layer] += 1
        for expert in wanted:
            rate = self._rate(layer, expert) + 1 - KEEP
            self._rates[layer][expert] = rate, self._visits[layer]

    def _rate(self, layer: int, expert: int) -> float:
        rate, visit = self._rates[layer][expert]
        return rate * KEEP ** (self._visits[layer] - visit)

    def _believed(self, said: Said) -> float:
        offset, stated, usual = self._weights
        odds = offset + stated * said.stated + usual * said.usual
        return 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0)))


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 1e-3), 0.999)
    return math.log(probability / (1 - probability))


USUAL = _log_odds(RARELY)
