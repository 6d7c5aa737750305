"""Learn how soon each expert is requested next, and evict the one that is last (practical Belady).

`FrequencyRecency` learns rates. A unit's rate is the share of its layer's recent calls that
requested it: a mean over memories with several half-lives, each weighted by how well it has
predicted, which suits both routing that repeats itself and routing with favourite experts. A unit's
value is its next use under this rate, discounted by the time until then. So units of the next
layers are worth a little more than those of the layer that has just run. One pool serves all
layers.

`ForecastPolicy`, the default, also learns transitions: for each layer, a logistic regression from
the latest requests of this layer and those before it to the requests of its next two calls, trained
with one step of normalised least mean squares per call. Rates and transitions are scored by their
log loss, and the better one decides. Predictors (`routing.predict`) are not used: they know the
next few layers, whose experts no policy evicts anyway.

The arithmetic is compiled (`kernels/cpu/learning.cpp`; tests compare it with
tests/oracles/learner.py). `make_policy` falls back to LRU if it does not build.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from kernels.cpu import choose_kernel
from kernels.cpu.learning import NativeLearner
from offload.policies.base import Values

HALF_LIVES = (200.0, 20.0, 1.0)
"""Half-life of each memory: calls of a layer after which a request counts half."""
KEEP = 0.5 ** (1 / np.array(HALF_LIVES))
AT_FIRST = (0.8, 0.1, 0.1)
"""Initial weights of the memories."""
FIRST_RATE = 0.1
LEARNING_RATE = 0.005
"""Step by which a call changes the weights of the memories."""
CYCLE_DISCOUNT = 0.5
"""Worth of a use one pass over the layers later."""
DISTANCE_DISCOUNT = 0.75
"""Worth of the next call of a layer if it is a whole pass away. More than `CYCLE_DISCOUNT`:
otherwise, caches smaller than one pass would evict favourite experts for those of the next layers.
"""
REACH = 6
"""Layers that transitions look back to, the layer itself included."""
MOST_BYTES = 64 << 20
"""Most bytes of the transitions' weights: with very many experts, they look back to fewer
layers."""
HABIT_RATE = 0.5
"""Share of a prediction's error that one call corrects."""
HEADS = 2
"""Predicted calls of a layer: the next, and the one after it."""
MEMORY = 0.995
"""Decay of the running losses per call."""
MARGIN = 1e-9
"""By how much one running loss must be below the other to count as less, despite rounding."""

LearnedCall = tuple[int, Sequence[int], Sequence[int]]
"""A call's number; how many calls earlier each head predicts it; the requested units, ascending, of
one layer, at least one."""


def discounts(num_layers: int) -> Values:
    """``(L, L)``: the discount of a use in layer ``[, then]`` after a call of layer ``[now]``."""
    ahead = (np.arange(num_layers) - np.arange(num_layers)[:, None] - 1) % num_layers + 1
    table: Values = DISTANCE_DISCOUNT ** (ahead / num_layers)
    return table


def reach_of(num_layers: int, width: int) -> int:
    """Layers that a model's transitions look back to."""
    affordable = MOST_BYTES // (4 * HEADS * num_layers * width * width)
    return min(REACH, num_layers, max(1, affordable))


def new_learner(num_layers: int, width: int, *, transitions: bool) -> NativeLearner:
    """A learner of rates, and of transitions if ``transitions`` is set."""
    native, reason = choose_kernel()
    assert native is not None, reason  # `make_policy` asks first
    learner: NativeLearner = native.learner(
        discounts(num_layers),
        width,
        keep=KEEP,
        shares=AT_FIRST,
        first=FIRST_RATE,
        cycle=CYCLE_DISCOUNT,
        heads=HEADS,
        reach=reach_of(num_layers, width) if transitions else 0,
        rate_step=LEARNING_RATE,
        transition_step=HABIT_RATE,
        forget=1 - MEMORY,
        margin=MARGIN,
    )
    return learner


class FrequencyRecency:
    """Values units by their learned rates."""

    name = "frequency_recency"
    _transitions = False

    def __init__(self, num_layers: int, width: int) -> None:
        self._discounts = discounts(num_layers)
        self._learner = new_learner(num_layers, width, transitions=self._transitions)
        self._layers, self._width, self._random = num_layers, width, random.Random(0)
        self._calls = self._layer = 0
        # After many calls without a miss, the oldest are dropped unlearned.
        self._unlearned: deque[tuple[int, Sequence[int]]] = deque(maxlen=16 * num_layers)
        self._values: Values = self._learner.learn([], 0)

    def touch(self, layer: int, units: Sequence[int]) -> None:
        self._calls += 1
        self._layer = layer
        if len(units):
            self._unlearned.append((self._calls, units))

    def values(self) -> Values:
        if self._unlearned:
            calls = [(call, self._ahead(), units) for call, units in self._unlearned]
            self._unlearned.clear()
            self._values = self._learner.learn(calls, self._layer)
        return self._values

    def bid(self, unit: int, probability: float) -> float:
        then, expert = divmod(unit, self._width)
        later = (1 - probability) * CYCLE_DISCOUNT * self._learner.tails[then, expert]
        return float(self._discounts[self._layer, then] * (probability + later))

    def _ahead(self) -> list[int]:
        """Distances from which to predict a call, drawn uniformly: units are valued at any distance
        from their next use."""
        layers, draw = self._layers, self._random.randint
        return [draw(1, layers) + head * layers for head in range(HEADS)]


class ForecastPolicy(FrequencyRecency):
    """Values units by their learned rates or transitions, whichever predict better."""

    name = "forecast"
    _transitions = True
