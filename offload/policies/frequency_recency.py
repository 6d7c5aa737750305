"""Frequency that forgets: how often a unit is asked for of late, and how soon its layer comes.

A unit's rate is the share of its layer's last visits that asked for it, older ones counting less:
a mean over memories of several lengths, each weighed by how well it has foretold what was asked
for, so that routing which repeats itself and routing which has favourites are both believed. A
unit is worth the discounted time to its next use under that rate: units of the layers that come
next are worth a little more than those of the layer that has just been. One pool serves all layers,
so the quota of a layer follows what it asks for; no layer can push another's hot experts out by
coming early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from offload.policies.base import Values

HALF_LIVES = (200.0, 20.0, 1.0)
"""Of each memory: visits of a layer after which one counts half."""
AT_FIRST = (0.8, 0.1, 0.1)
"""Weights of the memories."""
LEARNING_RATE = 0.005
"""How much of the weights a visit decides."""
CYCLE_DISCOUNT = 0.5
"""What a use is worth that comes one pass over the layers later."""

Layers = int | slice | Sequence[int]
"""One, all, or some."""


class Rates:
    """Of each unit, how often it is asked for when its layer comes; and when that will be.

    Attributes:
        rates: ``(L, width)``, at the next visit of each layer.
        usual: the same at later visits, of which short memories know nothing.
        both: ``(2, L, width)``, the two.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self.num_layers, self.width = num_layers, width
        self.both: Values = np.full((2, num_layers, width), 0.1)
        self.rates, self.usual = self.both
        self._memories: Values = np.full((num_layers, len(HALF_LIVES), width), 0.1)
        self._weights: Values = np.array(AT_FIRST)
        self._tails = _tail(self.usual)
        self._keep = 0.5 ** (1 / np.array(HALF_LIVES))
        self._visits = [0] * num_layers
        step = CYCLE_DISCOUNT ** (1 / num_layers)
        ahead = (np.arange(num_layers) - np.arange(num_layers)[:, None] - 1) % num_layers + 1
        self._discounts = step**ahead  # [now, then]

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        self._visits[layer] += 1
        # The first visits are averaged evenly, else the start would be remembered for long.
        keep = np.minimum(self._keep, 1 - 1 / (self._visits[layer] + 1))[:, None]
        memories, both = self._memories[layer], self.both[:, layer]
        if len(experts):  # expectation maximisation: whose word was it?
            shares = self._weights[:, None] * memories[:, experts]
            shares /= np.add.reduce(shares, axis=0) + 1e-12
            told = np.add.reduce(shares, axis=1) / len(experts)
            self._weights += LEARNING_RATE * (told - self._weights)
        memories *= keep
        memories[:, experts] += 1 - keep
        both[0], both[1] = self._weights @ memories, memories[0]
        np.minimum(np.maximum(both, 1e-3, out=both), 0.999, out=both)
        self._tails[layer] = _tail(self.usual[layer])

    def worth(self, layers: Layers, *coming: Values) -> Values:
        """``(..., width)``: what uses are worth, of which the next could come at once.

        Args:
            layers: whose units.
            coming: probabilities ``(..., width)`` of a use at the next visit of each layer, at the
                one after it and so on; later ones have the probability `usual`.
        """
        tail: Values = self._tails[layers]
        for probability in reversed(coming):
            tail = probability + (1 - probability) * CYCLE_DISCOUNT * tail
        return tail

    def discounted(self, layer: int, worth: Values) -> Values:
        """``(units,)``: `worth` of all layers by when they come, if this one has just been."""
        return (self._discounts[layer][:, None] * worth).reshape(-1)

    def worth_of(self, layer: int, unit: int, probability: float) -> float:
        """As `discounted`, for one unit of a given probability at its layer's next visit."""
        then, expert = divmod(unit, self.width)
        later = (1 - probability) * CYCLE_DISCOUNT * self._tails[then, expert]
        return float(self._discounts[layer, then] * (probability + later))


def _tail(rates: Values) -> Values:
    """What uses at these rates are worth, of which the next could come at once."""
    return rates / (1 - (1 - rates) * CYCLE_DISCOUNT)


class FrequencyRecency:
    """See the module. Worths are kept, and found again for those that something was learnt of."""

    name = "frequency_recency"

    def __init__(self, num_layers: int, width: int) -> None:
        self._rates = Rates(num_layers, width)
        self._calls = self._layer = 0
        # All hits for long: there is no hurry to learn, and what is old is not learnt at all.
        self._news: deque[tuple[int, Sequence[int]]] = deque(maxlen=16 * num_layers)
        self._worth = self._valued(slice(None))
        self._values = self._rates.discounted(0, self._worth)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._calls += 1
        self._layer = layer
        if len(units):
            self._news.append((self._calls, units))

    def values(self) -> Values:
        if self._news:
            layers: set[int] = set()
            while self._news:
                call, units = self._news.popleft()
                layer = units[0] // self._rates.width
                start = layer * self._rates.width
                layers.update(self._learn(call, layer, [unit - start for unit in units]))
            rows = sorted(layers)
            self._worth[rows] = self._valued(rows)
            self._values = self._rates.discounted(self._layer, self._worth)
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return self._rates.worth_of(self._layer, unit, probability)

    def _learn(self, call: int, layer: int, experts: list[int]) -> Iterable[int]:
        """From a call, one of so many; whose units are worth something else now."""
        self._rates.visit(layer, experts)
        return [layer]

    def _valued(self, layers: Layers) -> Values:
        """What uses of the units of some layers are worth, of which the next could come at once."""
        return self._rates.worth(layers, self._rates.rates[layers])
