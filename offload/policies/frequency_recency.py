"""Frequency that forgets: how often a unit is asked for of late, and how soon its layer comes.

A unit's rate is the share of its layer's last visits that asked for it, older ones counting less. A
unit is worth the discounted time to its next use under that rate: units of the layers that come
next are worth a little more than those of the layer that has just been. One pool serves all layers,
so the quota of a layer follows what it asks for; no layer can push another's hot experts out by
coming early.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offload.policies.base import Values

HALF_LIFE = 200.0
"""Visits of a layer after which one counts half."""
CYCLE_DISCOUNT = 0.5
"""What a use is worth that comes one pass over the layers later."""


class Rates:
    """Of each unit, how often it is asked for when its layer comes; and when that will be."""

    def __init__(self, num_layers: int, width: int) -> None:
        self.num_layers, self.width = num_layers, width
        self.rates: Values = np.full((num_layers, width), 0.1)
        self._tails = _tail(self.rates)
        self._keep = 0.5 ** (1 / HALF_LIFE)
        self._visits = [0] * num_layers
        step = CYCLE_DISCOUNT ** (1 / num_layers)
        ahead = (np.arange(num_layers) - np.arange(num_layers)[:, None] - 1) % num_layers + 1
        self._discounts = step**ahead  # [now, then]

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        self._visits[layer] += 1
        # The first visits are averaged evenly, else the start would be remembered for long.
        keep = min(self._keep, 1 - 1 / (self._visits[layer] + 1))
        row = self.rates[layer]
        row *= keep
        row[experts] += 1 - keep
        row.clip(1e-3, 0.999, out=row)
        self._tails[layer] = _tail(row)

    def worth(self, layer: int, *coming: Values) -> Values:
        """``(units,)``: the value of a use, discounted by when it is expected.

        Args:
            layer: the layer that has just been visited.
            coming: ``(L, width)`` probabilities of a use at the next visit of each layer, at the
                one after it and so on; later ones have the probability `rates`.
        """
        tail = self._tails
        for probability in reversed(coming):
            tail = probability + (1 - probability) * CYCLE_DISCOUNT * tail
        return (self._discounts[layer][:, None] * tail).reshape(-1)

    def worth_of(self, layer: int, unit: int, probability: float) -> float:
        """As `worth`, for one unit of a given probability at its layer's next visit."""
        then, expert = divmod(unit, self.width)
        later = (1 - probability) * CYCLE_DISCOUNT * self._tails[then, expert]
        return float(self._discounts[layer, then] * (probability + later))


def _tail(rates: Values) -> Values:
    """What uses at these rates are worth, of which the next could come at once."""
    return rates / (1 - (1 - rates) * CYCLE_DISCOUNT)


class FrequencyRecency:
    """See the module."""

    name = "frequency_recency"

    def __init__(self, num_layers: int, width: int) -> None:
        self._rates = Rates(num_layers, width)
        self._layer = 0

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._layer = layer
        start = layer * self._rates.width
        self._rates.visit(layer, [unit - start for unit in units])

    def forecast(self, units: Sequence[int], probability: Sequence[float]) -> None:
        pass

    def values(self) -> Values:
        return self._rates.worth(self._layer)

    def bid(self, unit: int, probability: float) -> float:
        return self._rates.worth_of(self._layer, unit, probability)
