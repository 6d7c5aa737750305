"""A predictor that says what it was told: where somebody else knows what a step will need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from routing.predict.forecast import Forecast
from routing.routing import Routing


@dataclass(frozen=True)
class Told:
    """See `routing.predict.Predictor`; with nothing told it is silent."""

    told: Forecast = field(default_factory=Forecast.empty)
    name: str = "drafts"
    context: int = 1

    @property
    def silent(self) -> bool:
        return len(self.told) == 0

    def start(self, tokens: Tensor) -> None:
        return None

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        return None

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        return None

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        kept = self.told.layer > layer
        if depth is not None:
            kept &= self.told.layer <= layer + depth
        layers = self.told.layer[kept]
        return Forecast(layers, self.told.expert[kept], self.told.probability[kept], layers - layer)
