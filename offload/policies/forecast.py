"""Practical Belady: evict what is expected to be used last, going by what has predicted well.

Three voices say how likely a unit's next use is: the usual rates, the habits of the routing
(`offload.policies.habits`), and the forecasts of a predictor where there is one. Each is scored on
what then happens, by its log loss; the best is listened to. With nothing to go by it is
frequency_recency. Legend: L layers, E experts of the widest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.policies.base import Values
from offload.policies.frequency_recency import Layers, Rates
from offload.policies.habits import MEMORY, Habits, log_odds, sigmoid


class ForecastPolicy:
    """See the module. What it is told costs next to nothing until values are asked for."""

    name = "forecast"

    def __init__(self, num_layers: int, width: int) -> None:
        self._rates = Rates(num_layers, width)
        self._habits = Habits(num_layers, width)
        self._width, self._most = width, 4 * num_layers
        # Valuing every unit takes about a millisecond in a deep model: between two times, only
        # those of the layers that were visited.
        self._patience, self._stale = max(1, num_layers // 4), 0
        self._worth: Values = np.zeros((num_layers, width))
        self._calls = self._layer = 0
        self._news: list[tuple[int, Sequence[int], Sequence[float] | None]] = []
        self._told: Values = np.full((num_layers, width), np.nan)
        self._told_losses = np.zeros(3)  # of forecasts, of both together, and of what they replace
        self._values: Values | None = None

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._calls += 1
        self._layer = layer
        self._news.append((self._calls, units, None))
        if len(self._news) > 2 * self._most:  # all hits for long: there is no hurry to learn
            del self._news[: -self._most]

    def forecast(self, units: Sequence[int], probability: Sequence[float]) -> None:
        self._news.append((self._calls, units, probability))

    def values(self) -> Values:
        if self._values is None or self._news:
            visited = self._catch_up()
            self._stale += len(visited)
            layers: Layers = visited
            if self._values is None or self._stale >= self._patience:
                layers, self._stale = slice(None), 0
            soon, usual = self._joined(layers), self._rates.usual[layers]
            later = self._habits.corrected(1, layers, usual)
            self._worth[layers] = self._rates.worth(layers, soon, later)
            self._values = self._rates.discounted(self._layer, self._worth)
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        return self._rates.worth_of(self._layer, unit, probability)

    def _catch_up(self) -> list[int]:
        """Learn from the news; which layers they are of."""
        layers: set[int] = set()
        for call, units, probability in self._news:
            if len(units) == 0:
                continue
            layer = units[0] // self._width
            layers.update(unit // self._width for unit in units)
            if probability is None:
                start = layer * self._width
                experts = [unit - start for unit in units]
                self._judge(layer, experts)
                usual = self._rates.rates[layer], self._rates.usual[layer]
                self._habits.visit(call, layer, experts, usual)
                self._rates.visit(layer, experts)
            else:
                self._hear(np.asarray(units), np.asarray(probability, dtype=np.float64))
        self._news.clear()
        return sorted(layers)

    def _hear(self, units: NDArray[np.int64], probability: Values) -> None:
        layers, experts = np.divmod(units, self._width)
        for layer in set(layers.tolist()):
            of_layer = layers == layer
            row, told = self._told[layer], probability[of_layer]
            if np.isnan(row[0]):  # who is not mentioned shares what the layer usually asks for
                rest = max(0.0, self._rates.rates[layer].sum() - told.sum())
                row[:] = rest / max(1, self._width - len(told))
            row[experts[of_layer]] = told
            np.clip(row, 0.003, 0.99, out=row)

    def _voices(self, told: Values, own: Values) -> tuple[Values, Values, Values]:
        return told, sigmoid((log_odds(told) + log_odds(own)) / 2), own

    def _joined(self, layers: Layers) -> Values:
        """Own predictions, and the predictor's where it has spoken and is to be believed."""
        own, told = self._soon(layers), self._told[layers]
        heard = ~np.isnan(told[:, 0])
        if not heard.any():
            return own
        joined = own.copy()
        joined[heard] = self._voices(told[heard], own[heard])[self._told_losses.argmin()]
        return joined

    def _judge(self, layer: int, experts: Sequence[int]) -> None:
        told = self._told[layer]
        if np.isnan(told[0]):
            return
        own = self._soon(layer)
        asked = np.zeros(self._width)
        asked[experts] = 1
        for voice, guess in enumerate(self._voices(told, own)):
            loss = -np.log(np.abs(1 - asked - guess)).mean()
            self._told_losses[voice] += (1 - MEMORY) * (loss - self._told_losses[voice])
        told[:] = np.nan

    def _soon(self, layers: Layers) -> Values:
        rates = self._rates.rates[layers]
        return self._habits.corrected(0, layers, rates)
