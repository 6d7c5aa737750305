"""Practical Belady: evict what is expected to be used last, going by what has predicted well.

Two voices say how likely a unit's next use is: the usual rates, and which experts have followed
which (`offload.policies.succession`). Each is scored on what then happens, by its log loss; the
better one is listened to. With nothing to go by it is frequency_recency. Predictors
(`routing.predict`) are not asked: they know the next layers, and what goes is not asked for in
them anyway.
"""

from __future__ import annotations

from offload.policies.base import Values
from offload.policies.frequency_recency import FrequencyRecency, Layers
from offload.policies.succession import Succession


class ForecastPolicy(FrequencyRecency):
    """See the module."""

    name = "forecast"

    def __init__(self, num_layers: int, width: int) -> None:
        self._succession = Succession(num_layers, width)
        super().__init__(num_layers, width)

    def _learn(self, call: int, layer: int, experts: list[int]) -> list[int]:
        foretold = self._succession.visit(call, layer, experts, self._rates.both[:, layer])
        self._rates.visit(layer, experts)
        return foretold

    def _valued(self, layers: Layers) -> Values:
        coming = self._succession.corrected(layers, self._rates.both[:, layers])
        return self._rates.worth(layers, *coming)
