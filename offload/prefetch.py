"""Prefetch experts that a predictor expects the next layers to need, where that pays.

The step loop calls `Prefetcher.start` at each step, and `visit` at each MoE layer while the
layer's missing experts are read. A forecast gives probabilities of absent experts; `Odds` corrects
them by how often earlier forecasts were right. The prefetcher bids on an expert if the wait that it
expects to save exceeds the wait that it risks: a wrong read delays those that a layer waits for,
and evicts an expert that may be needed. Each layer has a `PrefetchGate`. While it is closed, some
of the layer's bids are recorded and judged as if they had been placed, so a bad predictor costs a
few forecasts and no bytes. Prefetching never changes a result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.cache import ExpertCache
from routing import Routing
from routing.predict import Forecast, GivenForecast, Predictor, pad_contexts

MAX_DEPTH = 8
"""Layers ahead at most: further than that, forecasts are little better than frequencies."""
TRIAL = 8
"""Calls of a layer that its gate judges before it opens."""
RAREST = 256
"""Steps between two trials of a layer that keeps losing."""
WASTE = 0.3
"""Cost of a wrong prefetch, in loads: some of what is evicted for it is missed."""
_DECAY = 0.95  # of a gate's profit; a call 14 calls ago counts half
_FOLLOW = 0.05  # weight of the newest measurement of a load and of a layer
_LEARNING_RATE = 0.05
_KEEP = 0.5 ** (1 / 200)  # of an expert's rate at each call of its layer
_RATE = 0.05  # initial rate


@dataclass
class BidRecord:
    """Outcomes of one layer's bids; plain counters, readable from any thread.

    Attributes:
        right: absent experts with a bid, that the layer then requested.
        wrong: absent experts with a bid, that the layer did not request.
        missed: absent experts that the layer requested without a bid.
        placed: bids that became transfers.
        useful: placed bids whose expert was requested.
        wasted: placed bids whose expert was not requested.
        cancelled: placed bids that the router contradicted before the transfer began.
        saved_seconds: estimate of the stalls that placed bids saved.
        lost_seconds: estimate of what wasted bids and forecasting cost.
    """

    right: int = 0
    wrong: int = 0
    missed: int = 0
    placed: int = 0
    useful: int = 0
    wasted: int = 0
    cancelled: int = 0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0

    @property
    def precision(self) -> float:
        """Share of the bids, placed or only recorded, that were right; 0 without any."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of the absent experts requested that had a bid; 0 without any."""
        return self.right / max(1, self.right + self.missed)


@dataclass
class Bid:
    """A bid on one expert: when it should have arrived, and whether it became a transfer."""

    arrival: float
    placed: bool


class Odds:
    """Estimates the odds that an absent expert is requested, by a logistic regression trained
    online.

    Experts in memory are mostly the popular ones, so forecasts of absent ones are wrong more often
    than they claim. The features are the forecast and the expert's rate of requests; every forecast
    of an absent expert is an example, with or without a bid.

    Args:
        experts: E of each MoE layer.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        # Of each expert its rate at its last request, and the number of that call of its layer.
        self._rates = [[(_RATE, 0)] * count for count in experts]
        self._visits = [0] * len(experts)
        # Of 1, the forecast and the rate: at first, the forecast alone.
        self._weights = [0.0, 1.0, 0.0]
        self._open: list[dict[int, tuple[float, float]]] = [{} for _ in experts]

    def forget(self) -> None:
        """Drop the forecasts of layers that the step did not reach."""
        for forecasts in self._open:
            forecasts.clear()

    def chance(self, layer: int, expert: int, stated: float) -> float:
        """Corrected probability that an absent expert will be requested."""
        features = _log_odds(stated), _log_odds(self._rate(layer, expert)) - _log_odds(_RATE)
        self._open[layer][expert] = features
        return self._believed(features)

    def learn(self, layer: int, wanted: Sequence[int]) -> None:
        """Compare the experts that a layer requests with the forecasts for it."""
        asked, steps = set(wanted), [0.0, 0.0, 0.0]
        for expert, features in self._open[layer].items():
            error = _LEARNING_RATE * ((expert in asked) - self._believed(features))
            for at, feature in enumerate((1.0, *features)):
                steps[at] += error * feature
        # Without bounds, a long error would take long to unlearn.
        bounds = ((-2.0, 2.0), (0.25, 2.0), (0.0, 2.0))
        self._weights = [
            min(max(weight + step, low), high)
            for weight, step, (low, high) in zip(self._weights, steps, bounds, strict=True)
        ]
        self._open[layer].clear()
        self._visits[layer] += 1
        for expert in wanted:
            rate = self._rate(layer, expert) + 1 - _KEEP
            self._rates[layer][expert] = rate, self._visits[layer]

    def _rate(self, layer: int, expert: int) -> float:
        rate, visit = self._rates[layer][expert]
        return rate * _KEEP ** (self._visits[layer] - visit)

    def _believed(self, features: tuple[float, float]) -> float:
        offset, stated, usual = self._weights
        odds = offset + stated * features[0] + usual * features[1]
        return 1 / (1 + math.exp(-min(max(odds, -20.0), 20.0)))


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 1e-3), 0.999)
    return math.log(probability / (1 - probability))


class PrefetchGate:
    """Lets a layer place bids while they pay.

    Attributes:
        on: whether bids are placed; otherwise they are only recorded and judged.
        record: their outcomes.
    """

    def __init__(self) -> None:
        self.on = False
        self.record = BidRecord()
        self._profit = 0.0
        self._judged = 0
        self._interval, self._next = 1, 0
        self._rest = float(TRIAL)  # steps without forecasts after the gate had to close

    def asks(self, step: int) -> bool:
        """Return whether to forecast this layer in this step."""
        return self.on or step >= self._next

    def judge(self, gain: float, step: int) -> None:
        """Take in the seconds that the bids for one call gained; negative for a loss."""
        self._profit = _DECAY * self._profit + gain
        self._judged += 1
        if self._judged < TRIAL:
            return
        was_on, self.on = self.on, self._profit > 0
        if self.on:
            self._interval = 1
            self._rest = max(TRIAL, self._rest * _DECAY)
        elif was_on:  # recorded bids looked better than placed ones are
            self._profit, self._judged, self._interval = 0.0, 0, 1
            self._rest = min(4 * self._rest, RAREST)
            self._next = step + int(self._rest)
            return
        else:
            self._interval = 1 if gain > 0 else min(2 * self._interval, RAREST)
        self._next = step + self._interval


class Prefetcher:
    """Reads experts ahead of the layers that need them.

    Args:
        cache: where experts go.
        experts: E of each MoE layer.
        predictor: forecasts the experts of the next layers.
        load_seconds: initial estimate of the step loop's wait for one missing expert.
        read_seconds: returns how long one expert keeps the disk busy; by default `load_seconds`.
        clock: returns seconds.

    Attributes:
        gates: of each layer.
        load_seconds: measured wait of the step loop for one missing expert.
        layer_seconds: measured time from one MoE layer to the next, without waits.
        awake: whether the step loop is to call `visit` in this step.
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
        self.predictor = self._predicting = predictor
        self.gates = [PrefetchGate() for _ in experts]
        self.load_seconds, self.layer_seconds = load_seconds, 0.0
        self.awake = False
        self._cache, self._clock = cache, clock
        self._read_seconds = read_seconds or (lambda: self.load_seconds)
        self._odds = Odds(experts)
        self._bids: list[dict[int, Bid]] = [{} for _ in experts]
        self._free_at = 0.0  # when the disk will have served all placed bids
        self._spent = [0.0] * len(experts)  # seconds for forecasts in this step
        self._forecast_layers: set[int] = set()  # in this step
        self._step, self._began_early = 0, False
        self._began_at = clock()
        self._wait = 0.0  # of the current layer for its reads
        self._last: tuple[float, int] | None = None  # time and layer of the last visit
        self._stalled, self._loads = 0.0, 0  # its stall counter before it waited; its reads
        self._late = [0] * len(experts)  # the cache's `late` counters at each layer's last visit

    @property
    def depth(self) -> int:
        """The number of layers ahead for which bids are placed; 0 while no gate is open."""
        return self._depth() if any(gate.on for gate in self.gates) else 0

    @property
    def records(self) -> list[BidRecord]:
        return [gate.record for gate in self.gates]

    def bid_early(self, forecast: Forecast) -> None:
        """Bid for the next step, which begins when a draft has run all layers once more."""
        if not self._began_early:
            self._begin()
        self._began_early = True
        self._cache.poll()
        if targets := {layer for layer in range(len(self.gates)) if self._asks(layer)}:
            self._bid_on(forecast, targets, -1 - len(self.gates), self._clock())

    def start(self, contexts: Sequence[Sequence[int]], forecast: Forecast | None = None) -> None:
        """Begin a step.

        Args:
            contexts: for each token to decode, the last tokens of its sequence up to it, at most
                ``predictor.context``.
            forecast: a draft's forecast for this step, used instead of the predictor.
        """
        if not self._began_early:
            self._begin()
        self._predicting = self.predictor if forecast is None else GivenForecast(forecast)
        silent = isinstance(self._predicting, GivenForecast) and self._predicting.silent
        wanted = any(map(self._asks, range(len(self.gates))))
        self.awake, self._began_early = wanted and (self._began_early or not silent), False
        if self.awake:
            self._last = None
            self._began_at = self._clock()
            self._predicting.start(pad_contexts(contexts, self._predicting.context))
            self._bid(-1)

    def visit(
        self, layer: int, wanted: Sequence[int], hidden_states: Tensor, routing: Routing
    ) -> None:
        """Judge the bids on a layer whose missing experts are being read, and bid for later ones.

        Args:
            layer: MoE layer.
            wanted: the experts that it requests.
            hidden_states: its input rows ``(T, H)``.
            routing: the router's decision for these rows.
        """
        if self.awake:
            self._settle(layer, wanted)
            self._predicting.observe(layer, hidden_states, routing)
            self._bid(layer)

    def _begin(self) -> None:
        """Cancel bids on layers that the last step did not reach."""
        for layer, bids in enumerate(self._bids):
            for expert, bid in bids.items():
                if bid.placed:
                    self.gates[layer].record.cancelled += self._cancel(layer, expert)
            bids.clear()
        self._odds.forget()
        self._spent = [0.0] * len(self._spent)
        self._forecast_layers.clear()
        self._step, self._wait = self._step + 1, 0.0

    def _settle(self, layer: int, wanted: Sequence[int]) -> None:
        """Judge the bids on a layer by its requests, whose reads go before all other bids."""
        now, gate, record = self._clock(), self.gates[layer], self.gates[layer].record
        absent, asked = self._cache.missing(layer, wanted), set(wanted)
        self._measure(layer, absent, now)
        self._odds.learn(layer, wanted)
        bids, self._bids[layer] = self._bids[layer], {}
        gain = -self._spent[layer]
        record.lost_seconds += self._spent[layer] * gate.on
        for expert, bid in bids.items():
            if bid.placed and expert not in asked and self._cancel(layer, expert):
                record.cancelled += 1
            else:
                gain += self._outcome(layer, expert, bid, expert in asked, now)
        self._queue_reads(absent, bids, now)
        if layer in self._forecast_layers:
            record.missed += sum(expert not in bids for expert in absent)
            gate.judge(gain, self._step)

    def _outcome(self, layer: int, expert: int, bid: Bid, asked: bool, now: float) -> float:
        """Seconds that a bid saved when its layer was reached; negative if it did harm."""
        record, load = self.gates[layer].record, self.load_seconds
        rest = min(load, max(0.0, bid.arrival - now))  # the layer's remaining wait for it
        if bid.placed:
            rest = 0.0 if self._cache.has(layer, expert) else max(rest, load / 2)
        record.right += asked
        record.wrong += not asked
        if asked:
            record.useful += bid.placed
            record.saved_seconds += (load - rest) * bid.placed
            return load - rest
        if not bid.placed and rest == load:  # it would not have begun by now
            return 0.0
        lost = WASTE * load + rest
        record.wasted += bid.placed
        record.lost_seconds += lost * bid.placed
        return -lost

    def _queue_reads(self, absent: Sequence[int], own: dict[int, Bid], now: float) -> None:
        """Update arrival times: a layer's missing experts go before all bids not begun."""
        read = self._read_seconds()
        open_bids = [bid for bids in self._bids for bid in bids.values()]
        outstanding = sum(bid.placed and bid.arrival > now for bid in open_bids)
        self._free_at = min(self._free_at, now + outstanding * read)
        begun = [e for e in absent if e in own and own[e].placed and own[e].arrival - read <= now]
        ahead = read * (len(absent) - len(begun))
        for bid in open_bids:
            if bid.arrival - read > now:
                bid.arrival += ahead
        self._free_at = max(now, self._free_at) + read * sum(expert not in own for expert in absent)
        rests = (own[expert].arrival - now for expert in begun)
        self._wait = max(0.0, *rests, 0.0) + ahead

    def _cancel(self, layer: int, expert: int) -> bool:
        cancelled = self._cache.cancel(layer, expert)
        if cancelled:
            self._free_at -= self._read_seconds()
        return cancelled

    def _measure(self, layer: int, absent: Sequence[int], now: float) -> None:
        """Update `load_seconds` and `layer_seconds` by the counters since the last visit."""
        counters = self._cache.statistics.layers
        since, stall = self._began_at, 0.0
        if self._last is not None:
            since, last = self._last
            stall = max(0.0, counters[last].stall_seconds - self._stalled)
            if self._loads:
                self.load_seconds += _FOLLOW * (stall / self._loads - self.load_seconds)
        spent = max(0.0, now - since - stall)
        weight = _FOLLOW if self.layer_seconds else 1.0
        self.layer_seconds += weight * (spent - self.layer_seconds)
        own = counters[layer]
        self._loads = 0 if own.late > self._late[layer] else len(absent)
        self._late[layer], self._stalled = own.late, own.stall_seconds
        self._last = now, layer

    def _asks(self, layer: int) -> bool:
        return self.gates[layer].asks(self._step)

    def _depth(self) -> int:
        """Return the number of layers that run during one load."""
        ratio = self.load_seconds / max(self.layer_seconds, 1e-9)
        return max(1, min(MAX_DEPTH, math.ceil(ratio)))

    def _bid(self, layer: int) -> None:
        last = min(layer + self._depth(), len(self.gates) - 1)
        if targets := {target for target in range(layer + 1, last + 1) if self._asks(target)}:
            began = self._clock()
            self._bid_on(self._predicting.forecast(layer, last - layer), targets, layer, began)

    def _bid_on(self, forecast: Forecast, targets: set[int], layer: int, began: float) -> None:
        """Bid for the target layers, the likeliest experts first, while at ``layer``; they share
        the time that this takes."""
        named = forecast.layer.tolist(), forecast.expert.tolist(), forecast.probability.tolist()
        offers = []
        for target, expert, stated in zip(*named, strict=True):
            if target not in targets or expert in self._bids[target]:
                continue
            if self._cache.lacks(target, expert):
                offers.append((self._odds.chance(target, expert, stated), target, expert))
        now = self._clock()
        for chance, target, expert in sorted(offers, reverse=True):
            left = self._wait + (target - layer) * self.layer_seconds
            self._place(target, expert, chance, now, left)
        self._forecast_layers.update(targets)
        spent = max(0.0, now - began - self._wait)  # this layer waits anyway
        for target in targets:
            self._spent[target] += spent / len(targets)

    def _place(self, layer: int, expert: int, chance: float, now: float, left: float) -> None:
        """Bid on an expert whose layer runs in ``left`` seconds, if that pays."""
        load, read, gate = self.load_seconds, self._read_seconds(), self.gates[layer]
        recorded = 0 if gate.on else sum(len(bids) for bids in self._bids)
        arrival = max(now, self._free_at) + read * (1 + recorded)
        rest = min(load, max(0.0, arrival - now - left))  # under way when its layer comes
        saved, lost = min(load, left) - rest, WASTE * load + rest
        if chance * saved <= (1 - chance) * lost:
            return
        if gate.on:
            if not self._cache.prefetch(layer, expert, value=chance):
                return
            gate.record.placed += 1
            self._free_at = arrival
        self._bids[layer][expert] = Bid(arrival, gate.on)
