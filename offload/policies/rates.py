"""How often a unit is asked for of late, and what uses at such rates are worth.

A unit's rate is the share of its layer's last visits that asked for it, older ones counting less:
a mean over memories of several lengths, each weighed by how well it has foretold what was asked
for, so that routing which repeats itself and routing which has favourites are both believed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offload.policies.base import Values

HALF_LIVES = (200.0, 20.0, 1.0)
"""Of each memory: visits of a layer after which one counts half."""
AT_FIRST = (0.8, 0.1, 0.1)
"""Weights of the memories."""
FIRST_RATE = 0.1
LEARNING_RATE = 0.005
"""How much of the weights a visit decides."""
CYCLE_DISCOUNT = 0.5
"""What a use is worth that comes one pass over the layers later."""
DISTANCE_DISCOUNT = 0.75
"""What the next visit of a layer is worth if it is a whole pass away. Waiting is cheaper here: a
slot given up meanwhile goes to a unit of the layer that has just been, which has longer to wait.
Were it as dear, caches smaller than a pass would live from one layer to the next, and give up its
favourites for whatever comes soon."""
KEEP = 0.5 ** (1 / np.array(HALF_LIVES))

Layers = int | slice | Sequence[int]
"""One, all, or some."""


class Rates:
    """Of each unit, how often it is asked for when its layer comes.

    Attributes:
        rates: ``(L, width)``, at the next visit of each layer.
        usual: the same at later visits, of which short memories know nothing.
        both: ``(2, L, width)``, the two.
        tails: ``(L, width)``, what uses at the usual rates are worth, of which the next could come
            at once.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self.both: Values = np.full((2, num_layers, width), FIRST_RATE)
        self.rates, self.usual = self.both
        self._memories: Values = np.full((num_layers, len(HALF_LIVES), width), FIRST_RATE)
        self._weights: Values = np.array(AT_FIRST)
        self.tails = _tail(self.usual)
        self._visits = [0] * num_layers

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        self._visits[layer] += 1
        # The first visits are averaged evenly, else the start would be remembered for long.
        keep = np.minimum(KEEP, 1 - 1 / (self._visits[layer] + 1))[:, None]
        memories, both = self._memories[layer], self.both[:, layer]
        # Expectation maximisation: whose word was it?
        shares = self._weights[:, None] * memories[:, experts]
        shares /= np.add.reduce(shares, axis=0) + 1e-12
        told = np.add.reduce(shares, axis=1) / len(experts)
        self._weights += LEARNING_RATE * (told - self._weights)
        memories *= keep
        memories[:, experts] += 1 - keep
        both[0], both[1] = self._weights @ memories, memories[0]
        np.minimum(np.maximum(both, 1e-3, out=both), 0.999, out=both)
        self.tails[layer] = _tail(self.usual[layer])

    def worth(self, layers: Layers, coming: Values) -> Values:
        """``(..., width)``: what uses are worth, of which the next could come at once.

        Args:
            layers: whose units.
            coming: probabilities ``(2, ..., width)`` of a use at the next visit of each layer and
                at the one after it; later ones have the probability `usual`.
        """
        tail: Values = self.tails[layers]
        for probability in reversed(coming):
            tail = probability + (1 - probability) * CYCLE_DISCOUNT * tail
        return tail


def discounts(num_layers: int) -> Values:
    """``(L, L)``, [now, then]: what a use is worth by when its layer comes next."""
    ahead = (np.arange(num_layers) - np.arange(num_layers)[:, None] - 1) % num_layers + 1
    table: Values = DISTANCE_DISCOUNT ** (ahead / num_layers)
    return table


def _tail(rates: Values) -> Values:
    return rates / (1 - (1 - rates) * CYCLE_DISCOUNT)
