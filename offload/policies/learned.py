"""Learn how soon each expert is asked for next, and evict the last of them (practical Belady).

`FrequencyRecency` learns rates. A unit's rate is the share of its layer's last visits that asked
for it: a mean over memories of several half-lives, each weighted by how well it has predicted, so
that routing that repeats itself and routing that has favourites are both followed. A unit is worth
the discounted time to its next use under its rate, so units of the next layers are worth a little
more than those of the layer that has just run. One pool serves all layers.

`ForecastPolicy`, the default, also learns which experts follow which: for every layer a logistic
regression from what this layer and those before it asked for last to what it asks for at its next
two visits, by one step of normalised least mean squares a visit. Rates and habits are scored by
their log loss on what then happens, and the better one decides. Predictors (`routing.predict`) are
not asked: they know the next layers, and no policy evicts what those ask for anyway.

The arithmetic is compiled (`kernels/cpu/learning.cpp`; tests hold it to tests/oracles/learner.py).
`make_policy` falls back to LRU where it does not build.
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
"""Of each memory: visits of a layer after which one counts half."""
KEEP = 0.5 ** (1 / np.array(HALF_LIVES))
AT_FIRST = (0.8, 0.1, 0.1)
"""Weights of the memories."""
FIRST_RATE = 0.1
LEARNING_RATE = 0.005
"""How much of the weights a visit decides."""
CYCLE_DISCOUNT = 0.5
"""What a use is worth that comes one pass over the layers later."""
DISTANCE_DISCOUNT = 0.75
"""What the next visit of a layer is worth if it is a whole pass away. Waiting is cheaper here than
by `CYCLE_DISCOUNT`: a slot given up meanwhile goes to a unit of the layer that has just run, which
waits longer. Otherwise caches smaller than a pass would give up favourites for what comes soon."""
REACH = 6
"""Layers that habits look back to, the layer itself included."""
MOST_BYTES = 64 << 20
"""Of habits' weights: with very many experts, they look back to fewer layers."""
HABIT_RATE = 0.5
"""How much of its error a visit takes from the habits that predicted."""
HEADS = 2
"""The next visit of a layer, and the one after it."""
MEMORY = 0.995
"""How much of the running losses a visit keeps."""
MARGIN = 1e-9
"""By which a running loss must be less to count as less: rounding is not."""

LearnedCall = tuple[int, Sequence[int], Sequence[int]]
"""Its number; how many calls before it each head is to predict it; the units asked for, ascending,
of one layer, at least one."""


def discounts(num_layers: int) -> Values:
    """``(L, L)``, [now, then]: what a use is worth by when its layer comes next."""
    ahead = (np.arange(num_layers) - np.arange(num_layers)[:, None] - 1) % num_layers + 1
    table: Values = DISTANCE_DISCOUNT ** (ahead / num_layers)
    return table


def reach_of(num_layers: int, width: int) -> int:
    """Layers that a model's habits look back to."""
    affordable = MOST_BYTES // (4 * HEADS * num_layers * width * width)
    return min(REACH, num_layers, max(1, affordable))


def new_learner(num_layers: int, width: int, *, habits: bool) -> NativeLearner:
    """Learns rates, and which experts follow which where ``habits`` is set."""
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
        reach=reach_of(num_layers, width) if habits else 0,
        rate_step=LEARNING_RATE,
        habit_step=HABIT_RATE,
        forget=1 - MEMORY,
        margin=MARGIN,
    )
    return learner


class FrequencyRecency:
    """See the module."""

    name = "frequency_recency"
    _habits = False

    def __init__(self, num_layers: int, width: int) -> None:
        self._discounts = discounts(num_layers)
        self._learner = new_learner(num_layers, width, habits=self._habits)
        self._layers, self._width, self._random = num_layers, width, random.Random(0)
        self._calls = self._layer = 0
        # After many calls without a miss there is no hurry to learn, and old calls are left out.
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
        """How many calls earlier a call is predicted from, drawn evenly: units are valued at any
        distance from their next use."""
        layers, draw = self._layers, self._random.randint
        return [draw(1, layers) + head * layers for head in range(HEADS)]


class ForecastPolicy(FrequencyRecency):
    """See the module."""

    name = "forecast"
    _habits = True
