"""Prefetching: forecasts become bids, bids become transfers where they pay.

A bid is worth its probability times the stall it saves, over its bytes (all experts of a cache have
the same). It saves nothing if it cannot arrive in time behind what is on its way already, and costs
something if it is wrong: what it pushes out may be asked for again, and a read under way stands in
front of those that a layer waits for. So on a disk that has no time to spare only sure bids are
made. All this is measured, and a `Governor` for each layer stops what does not pay. Nothing here
can change a result: it only moves experts nearer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from offload.bids import Bid, Bids, Offer
from offload.cache import ExpertCache
from offload.governor import BidRecord, Governor
from offload.measures import Measures
from offload.trust import Trust
from routing import Routing
from routing.predict import Forecast, GivenForecast, Predictor, pad_contexts

MAX_DEPTH = 8
"""Layers ahead at most: further than that, forecasts are little better than frequencies."""


class Prefetcher:
    """Called by the step loop: `start` once a step, and `foretell` before it where drafts are made
    for it; at each MoE layer the cache's `acquire`, `visit` while what is missing is read, and then
    the experts.

    Args:
        cache: where bids are placed.
        experts: E of each MoE layer.
        predictor: which experts come next.
        load_seconds: for one expert, until it has been measured.
        read_seconds: for which reading one expert keeps the disk busy, as it is measured; what a
            layer waits for one by default.

    Attributes:
        governors: of each layer; whether its bids are placed, and what became of them.
        awake: it hears of this step's layers.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts: Sequence[int],
        predictor: Predictor,
        load_seconds: float,
        read_seconds: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.predictor = self._guide = predictor
        self.governors = [Governor() for _ in experts]
        self.measures = Measures(cache, len(experts), load_seconds, clock())
        self._cache, self._layers = cache, range(len(experts))
        self._clock = clock
        self._read_seconds = read_seconds or (lambda: self.measures.load_seconds)
        self._bids = Bids(cache, len(experts), load_seconds)
        self._trust = Trust(experts)
        self._spent = [0.0] * len(experts)  # seconds, on this step's bids for each layer
        self._asked: set[int] = set()  # layers that were forecast in this step
        self._step, self.awake, self._foretold = 0, False, False
        self._wait = 0.0  # for reads of the layer that the step loop is at

    @property
    def depth(self) -> int:
        """Layers ahead that bids are made for; 0 where no layer's bids are placed."""
        return self._depth() if any(governor.on for governor in self.governors) else 0

    @property
    def records(self) -> list[BidRecord]:
        return [governor.record for governor in self.governors]

    def foretell(self, told: Forecast) -> None:
        """Bid for a step that begins when all its layers have been passed once more, by a draft."""
        if not self._foretold:
            self._begin()
        self._foretold = True
        self._cache.poll()
        if targets := set(filter(self._bids_on, self._layers)):
            self._bid_on(told, targets, -1 - len(self._layers), self._clock())

    def start(self, contexts: Sequence[Sequence[int]], told: Forecast | None = None) -> None:
        """A step begins.

        Args:
            contexts: of each token that it decodes, the last ones of its sequence up to it:
                ``predictor.context``, or fewer.
            told: what it will need, by who knows better than the predictor.
        """
        if not self._foretold:
            self._begin()
        self._guide = self.predictor if told is None else GivenForecast(told)
        followed, wanted = self.awake, any(map(self._bids_on, self._layers))
        silent = isinstance(self._guide, GivenForecast) and self._guide.silent
        self.awake, self._foretold = wanted and (self._foretold or not silent), False
        if self.awake:
            self.measures.start(self._clock(), followed)
            self._guide.start(pad_contexts(contexts, self._guide.context))
            self._bid(-1)

    def visit(
        self, layer: int, wanted: Sequence[int], hidden_states: Tensor, routing: Routing
    ) -> None:
        """The router has decided, and what is missing is being read: judge the bids on this layer,
        and bid for those to come.

        Args:
            layer: MoE layer.
            wanted: the experts that it asks for.
            hidden_states: rows ``(T, H)`` that they read.
            routing: what the router decided for these.
        """
        if self.awake:
            self._settle(layer, wanted)
            self._guide.observe(layer, hidden_states, routing)
            self._bid(layer)

    def _settle(self, layer: int, wanted: Sequence[int]) -> None:
        """Take back what the router contradicts, and see what the others have come to."""
        now, governor, cache = self._clock(), self.governors[layer], self._cache
        absent = cache.missing(layer, wanted)
        self.measures.arrive(layer, absent, now)
        self._trust.visit(layer, wanted)
        self._bids.read = self._read_seconds()
        bids, asked = self._bids.take(layer, now), set(wanted)
        load, loss = self.measures.load_seconds, self.measures.loss_seconds
        gain = -self._spent[layer]
        governor.record.lost_seconds += self._spent[layer] * governor.on
        for expert, bid in bids.items():
            if bid.placed and expert not in asked and self._bids.cancel(layer, expert):
                governor.record.cancelled += 1
                continue
            there = cache.has(layer, expert)
            rest = bid.rest(there, now, load)
            gain += governor.outcome(bid.placed, expert in asked, there, rest, load, loss)
        self._wait = 0.0
        if absent:
            self._wait, in_the_way = self._bids.give_way(absent, bids, now)
            for target, seconds in in_the_way.items():
                self._spent[target] += seconds
        if layer in self._asked:
            governor.record.missed += sum(expert not in bids for expert in absent)
            governor.judge(gain, self._step)

    def _begin(self) -> None:
        """The last step is over."""
        for layer, count in self._bids.clear().items():  # that it did not reach
            self.governors[layer].record.cancelled += count
        self._trust.forget()
        self._spent = [0.0] * len(self._spent)
        self._asked.clear()
        self._step, self._wait = self._step + 1, 0.0

    def _bids_on(self, layer: int) -> bool:
        return self.governors[layer].asks(self._step)

    def _depth(self) -> int:
        """As far ahead as a load takes."""
        ratio = self.measures.load_seconds / max(self.measures.layer_seconds, 1e-9)
        return max(1, min(MAX_DEPTH, math.ceil(ratio)))

    def _bid(self, layer: int) -> None:
        last = min(layer + self._depth(), len(self.governors) - 1)
        targets = set(filter(self._bids_on, range(layer + 1, last + 1)))
        if not targets:
            return
        began = self._clock()
        self._bid_on(self._guide.forecast(layer, last - layer), targets, layer, began)

    def _bid_on(self, forecast: Forecast, targets: set[int], layer: int, began: float) -> None:
        """Bid for some layers, at a layer; who was forecast since it began pays for the time."""
        named = forecast.layer.tolist(), forecast.expert.tolist(), forecast.probability.tolist()
        offers = [
            self._offer(*each, layer)
            for each in zip(*named, strict=True)
            if each[0] in targets and self._cache.lacks(*each[:2])
        ]
        now = self._clock()
        for offer in sorted(filter(None, offers), reverse=True):
            self._place(offer, now)
        self._asked.update(targets)
        spent = max(0.0, now - began - self._wait)  # this layer waits anyway
        for target in targets:
            self._spent[target] += spent / len(targets)

    def _offer(self, target: int, expert: int, stated: float, layer: int) -> Offer | None:
        """An absent expert, if it is worth a bid when the disk has nothing else to do."""
        if expert in self._bids.of[target]:
            return None
        left = self._wait + (target - layer) * self.measures.layer_seconds
        chance = self._trust.chance(target, expert, stated)
        saved = min(self.measures.load_seconds, left)
        worth = chance * saved - (1 - chance) * self.measures.loss_seconds
        return Offer(worth, chance, target, expert, left) if worth > 0 else None

    def _place(self, offer: Offer, now: float) -> None:
        """Bid on an expert if it still pays behind those that are worth more."""
        load, governor = self.measures.load_seconds, self.governors[offer.layer]
        arrival = self._bids.arrival(governor.on, now)
        rest = min(load, max(0.0, arrival - now - offer.left))  # under way when its layer comes
        lost = self.measures.loss_seconds + rest
        if offer.chance * (load - rest) <= (1 - offer.chance) * lost:
            return
        if governor.on:
            if not self._cache.prefetch(offer.layer, offer.expert, value=offer.chance):
                return
            governor.record.placed += 1
        self._bids.add(offer.layer, offer.expert, Bid(arrival, governor.on))
