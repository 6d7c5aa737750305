"""Frequency that forgets: how often a unit is asked for of late, and how soon its layer comes.

A unit is worth the discounted time to its next use under its rate (`offload.policies.rates`): units
of the layers that come next are worth a little more than those of the layer that has just been. One
pool serves all layers, so the quota of a layer follows what it asks for; no layer can push
another's hot experts out by coming early.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from offload.policies.base import Values
from offload.policies.learning import new_learner
from offload.policies.rates import CYCLE_DISCOUNT, discounts
from offload.policies.succession import HEADS


class FrequencyRecency:
    """See the module."""

    name = "frequency_recency"
    _habits = False

    def __init__(self, num_layers: int, width: int) -> None:
        self._learner = new_learner(num_layers, width, habits=self._habits)
        self._discounts = discounts(num_layers)
        self._layers, self._width, self._random = num_layers, width, random.Random(0)
        self._calls = self._layer = 0
        # All hits for long: there is no hurry to learn, and what is old is not learnt at all.
        self._news: deque[tuple[int, Sequence[int]]] = deque(maxlen=16 * num_layers)
        self._values = self._learner.learn([], 0)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._calls += 1
        self._layer = layer
        if len(units):
            self._news.append((self._calls, units))

    def values(self) -> Values:
        if self._news:
            news = [(call, self._ahead(), units) for call, units in self._news]
            self._news.clear()
            self._values = self._learner.learn(news, self._layer)
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        then, expert = divmod(unit, self._width)
        later = (1 - probability) * CYCLE_DISCOUNT * self._learner.tails[then, expert]
        return float(self._discounts[self._layer, then] * (probability + later))

    def _ahead(self) -> list[int]:
        """A call is foretold from what was known so many calls before it: any distance at which
        units are valued is as likely."""
        layers, draw = self._layers, self._random.randint
        return [draw(1, layers) + head * layers for head in range(HEADS)]
