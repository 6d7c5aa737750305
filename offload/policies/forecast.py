"""Practical Belady: evict what is expected to be used last, going by what has predicted well.

Two voices learn on the way how likely a unit's next use is: the usual rates, and which experts have
followed which (`offload.policies.succession`). Each is scored on what then happens, by its log
loss; the better one is listened to. With nothing to go by it is frequency_recency. Where the model
has been calibrated, a third hears both and the routers (`offload.policies.next_use`), and decides
where one sequence decodes, as long as it would hit more (`offload.policies.duel`), by more than its
arithmetic costs. Predictors (`routing.predict`) are not asked: they know the next layers, and what
goes is not asked for in them anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from offload.policies.base import Values, log_odds
from offload.policies.duel import Duel
from offload.policies.foresight import Foresight
from offload.policies.frequency_recency import FrequencyRecency
from offload.policies.next_use import NextUse
from routing.predict.forecast import Floats


class ForecastPolicy(FrequencyRecency):
    """See the module.

    Attributes:
        foresight: what calibration has brought, if anything.
    """

    name = "forecast"
    _habits = True
    _clock = staticmethod(time.perf_counter)

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.foresight: Foresight | None = None
        self._duel = Duel(0, lambda: 0, 0.0)
        self._valued = -1  # the call behind which units were valued last
        self._foreseen, self._believed = super().values(), False
        self._heard_in = 0.0  # seconds

    def calibrate(
        self, next_use: NextUse, room: Callable[[], int], load_seconds: float = math.inf
    ) -> None:
        """Go by this from now on, where it is better by more than its arithmetic costs.

        Args:
            next_use: for as many layers and experts.
            room: how many units the cache can hold now.
            load_seconds: that a hit saves; inf: time does not count.
        """
        self.foresight = Foresight(next_use)
        self._duel = Duel(self._layers * self._width, room, load_seconds)

    def hear(self, layer: int, rows: Tensor) -> None:
        """A layer is about to ask for what its router chose for rows ``(T, H)``; the last is the
        latest of its sequence."""
        if self.foresight is not None and not self._duel.rests:
            began = self._clock()
            self.foresight.hear(layer, rows)
            self._heard_in = self._clock() - began

    def touch(self, layer: int, units: Sequence[int]) -> None:
        super().touch(layer, units)
        foresight = self.foresight
        if foresight is not None and len(units):
            foresight.visit(layer, [unit - layer * self._width for unit in units])
            if foresight.speaks:
                self._duel.visit(units)

    def values(self) -> Values:
        values, foresight = super().values(), self.foresight
        if foresight is None or not foresight.speaks or self._duel.rests:
            return values
        if self._valued != self._calls:
            self._valued, began = self._calls, self._clock()
            discounts = self._discounts[self._layer]
            soon = foresight.soon(values, discounts)
            self._foreseen = (discounts[:, None] * soon).reshape(-1)
            self._believed = self._duel.settle(self._foreseen, values)
            self._duel.pay(self._heard_in + self._clock() - began)
        return self._foreseen if self._believed else values

    def learning_odds(self, values: Values) -> Floats:
        """``(L, W)`` log-odds by what is learnt on the way, of its `values`; distances left out."""
        worth = values.reshape(self._layers, -1) / self._discounts[self._layer][:, None]
        return log_odds(worth.astype(np.float32))

    def bid(self, unit: int, probability: float) -> float:
        foresight = self.foresight
        if foresight is None or not foresight.speaks or not self._believed or self._duel.rests:
            return super().bid(unit, probability)
        then, expert = divmod(unit, self._width)
        later = (1 - probability) * foresight.tail(then, expert)
        return float(self._discounts[self._layer, then] * (probability + later))
