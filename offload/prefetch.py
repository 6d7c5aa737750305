"""Prefetching: forecasts become bids, bids become transfers where they pay.

A bid is worth its probability times the stall it saves, over its bytes (all experts of a cache have
the same). It saves nothing if it cannot arrive in time behind what is on its way already, and costs
something if it is wrong: what it pushes out may be asked for again, and a read under way stands in
front of those that a layer waits for. Both are measured, and a `Governor` for each layer stops what
does not pay. Nothing here can change a result: it only moves experts nearer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from offload.bids import Bid, Bids, Offer
from offload.cache import ExpertCache
from offload.governor import Governor, LayerRecord
from offload.measures import Measures
from routing import Routing
from routing.predict import Forecast, Predictor, Told

MAX_DEPTH = 8
"""Layers ahead at most: further than that, forecasts are little better than frequencies."""


class Prefetcher:
    """Called by the step loop: `start` once a step; at each MoE layer `settle`, the cache's
    `acquire`, `look_ahead`, and then the experts.

    Args:
        cache: where bids are placed.
        experts: E of each MoE layer.
        predictor: which experts come next.
        load_seconds: for one expert, until it has been measured.
        always_forecast: also where no bid would be placed, for a cache policy that lives on
            forecasts; their cost is then not the bids'.
        bids: whether to make any.

    Attributes:
        governors: of each layer; whether its bids are placed, and what became of them.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts: Sequence[int],
        predictor: Predictor,
        load_seconds: float,
        always_forecast: bool = False,
        bids: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.predictor = self._guide = predictor
        self.governors = [Governor() for _ in experts]
        self.measures = Measures(cache, experts, load_seconds, clock())
        self._cache, self._width, self._layers = cache, max(experts), range(len(experts))
        self._always, self._bidding, self._clock = always_forecast, bids, clock
        self._bids = Bids(cache, len(experts), load_seconds)
        self._spent = [0.0] * len(experts)  # seconds, on this step's bids for each layer
        self._asked: set[int] = set()  # layers that were forecast in this step
        self._step, self._awake = 0, False
        self._wait = 0.0  # for reads of the layer that the step loop is at

    @property
    def depth(self) -> int:
        """Layers ahead that bids are made for; 0 where no layer's bids are placed."""
        return self._depth() if any(governor.on for governor in self.governors) else 0

    @property
    def records(self) -> list[LayerRecord]:
        return [governor.record for governor in self.governors]

    def start(self, tokens: Tensor, told: Forecast | None = None) -> None:
        """A step begins: tokens as of `Predictor.start`, and what is told by who knows better."""
        for layer, bids in enumerate(self._bids.of):  # of layers that the last step did not reach
            for expert, bid in bids.items():
                if bid.placed:
                    self.records[layer].cancelled += self._bids.cancel(layer, expert)
            bids.clear()
            self._spent[layer] = 0.0
        self._asked.clear()
        self._guide = self.predictor if told is None else Told(told)
        self._step, self._wait = self._step + 1, 0.0
        followed, wanted = self._awake, self._always or any(map(self._bids_on, self._layers))
        self._awake = wanted and not (isinstance(self._guide, Told) and self._guide.silent)
        if self._awake:
            self.measures.start(self._clock(), followed)
            self._guide.start(tokens)
            self._bid(-1)

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        """Rows ``(T, H)`` as they come into a layer's block, before its attention."""
        if self._awake:
            self._guide.enter(layer, hidden_states)
            self._bid(layer - 1)

    def settle(self, layer: int, wanted: Sequence[int]) -> None:
        """The router has decided: take back what it contradicts, and judge the bids.

        Args:
            layer: MoE layer.
            wanted: the experts that this call will acquire.
        """
        if not self._awake:
            return
        now, governor = self._clock(), self.governors[layer]
        self.measures.arrive(layer, wanted, now)
        self._bids.load = self.measures.load_seconds
        bids, asked = self._bids.take(layer, now), set(wanted)
        there = [planes >= self._cache.num_planes for planes in self._cache.resident(layer)]
        load, loss = self.measures.load_seconds, self.measures.loss_seconds
        gain = -self._spent[layer]
        governor.record.lost_seconds += self._spent[layer] * governor.on
        for expert, bid in bids.items():
            if bid.placed and expert not in asked and self._bids.cancel(layer, expert):
                governor.record.cancelled += 1
                continue
            rest = bid.rest(there[expert], now, load)
            gain += governor.outcome(bid.placed, expert in asked, there[expert], rest, load, loss)
        absent, self._wait = [expert for expert in asked if not there[expert]], 0.0
        if absent:
            self._wait, in_the_way = self._bids.give_way(absent, bids, now)
            for target, seconds in in_the_way.items():
                self._spent[target] += seconds
        if layer in self._asked:
            governor.record.missed += sum(expert not in bids for expert in absent)
            governor.judge(gain, self._step)

    def look_ahead(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """Bid for the layers to come, behind the reads that this layer waits for.

        Args:
            layer: MoE layer.
            hidden_states: rows ``(T, H)`` that its experts read.
            routing: what its router decided for them.
        """
        if self._awake:
            self._guide.observe(layer, hidden_states, routing)
            self._bid(layer)

    def _bids_on(self, layer: int) -> bool:
        return self._bidding and self.governors[layer].asks(self._step)

    def _depth(self) -> int:
        """As far ahead as a load takes."""
        ratio = self.measures.load_seconds / max(self.measures.layer_seconds, 1e-9)
        return max(1, min(MAX_DEPTH, math.ceil(ratio)))

    def _bid(self, layer: int) -> None:
        last = min(layer + self._depth(), len(self.governors) - 1)
        targets = list(filter(self._bids_on, range(layer + 1, last + 1)))
        if not targets and not (self._always and last > layer):
            return
        began = self._clock()
        forecast = self._guide.forecast(layer, last - layer)
        layers, experts = forecast.layer.numpy(), forecast.expert.numpy()
        probability = forecast.probability.numpy()
        units = layers * self._width + experts
        self._cache.policy.forecast(units.tolist(), probability.tolist())
        offers = []
        for target in targets:
            mine = layers == target
            left = self._wait + (target - layer) * self.measures.layer_seconds
            offers += self._offers(target, experts[mine], probability[mine], left)
        now = self._clock()
        for offer in sorted(offers, reverse=True):
            self._place(offer, now)
        self._asked.update(targets)
        for target in () if self._always else targets:
            self._spent[target] += (now - began) / len(targets)

    def _offers(
        self, target: int, experts: np.ndarray, probability: np.ndarray, left: float
    ) -> list[Offer]:
        """Absent experts that are worth a bid if the disk has nothing else to do."""
        saved, loss = min(self.measures.load_seconds, left), self.measures.loss_seconds
        absent = self._cache.slot_ids(target).numpy()[experts] < 0
        worth = probability * saved - (1 - probability) * loss
        return [
            Offer(float(worth[i]), float(probability[i]), target, int(experts[i]), left)
            for i in np.flatnonzero(absent & (worth > 0))
            if int(experts[i]) not in self._bids.of[target]
        ]

    def _place(self, offer: Offer, now: float) -> None:
        """Bid on an expert if it still pays behind those that are worth more."""
        load, governor = self.measures.load_seconds, self.governors[offer.layer]
        arrival = self._bids.arrival(governor.on, now)
        saved = load - min(load, max(0.0, arrival - now - offer.left))
        chance = offer.probability
        if chance * saved <= (1 - chance) * self.measures.loss_seconds:
            return
        if governor.on:
            if not self._cache.prefetch(offer.layer, offer.expert, value=chance):
                return
            governor.record.placed += 1
        self._bids.add(offer.layer, offer.expert, Bid(arrival, governor.on))
