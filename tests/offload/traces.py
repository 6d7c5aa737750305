"""Routings over many steps, and predictors that know more or less of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from routing import Routing
from routing.predict import Forecast

LAYERS, EXPERTS, TOP_K = 6, 32, 4
SLOTS = LAYERS * 10

Trace = np.ndarray  # (steps, LAYERS, TOP_K)


class Guess:
    """A predictor that says what a function of (step, layer) tells it."""

    name, context = "guess", 1

    def __init__(self, say: Callable[[int, int], Sequence[tuple[int, float]]]) -> None:
        self.say, self.step, self.forecasts = say, -1, 0

    def at(self, step: int) -> None:
        self.step = step

    def start(self, tokens: Tensor) -> None: ...

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None: ...

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        self.forecasts += 1
        guesses = {}
        for target in range(layer + 1, min(layer + (depth or LAYERS), LAYERS - 1) + 1):
            guesses[target] = np.zeros((1, EXPERTS), dtype=np.float32)
            for expert, probability in self.say(self.step, target):
                guesses[target][0, expert] = probability
        return Forecast.of_rows(layer, guesses, 0.02)


def zipf(steps: int, seed: int = 0) -> Trace:
    """Few experts are asked for often, with a taste that drifts."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, EXPERTS + 1)
    order = np.stack([random.permutation(EXPERTS) for _ in range(LAYERS)])
    trace = np.empty((steps, LAYERS, TOP_K), dtype=np.int64)
    for step in range(steps):
        for layer in range(LAYERS):
            ranks = random.choice(EXPERTS, TOP_K, replace=False, p=weights / weights.sum())
            trace[step, layer] = order[layer, ranks]
        if step % 50 == 49:
            order = np.stack([random.permutation(row) for row in order])
    return trace


def uniform(steps: int, seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    return random.random((steps, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]


def cyclic(steps: int) -> Trace:
    """What fits exactly, over and over: one slot wasted costs LRU every hit."""
    per_layer = SLOTS // LAYERS
    start = np.arange(steps)[:, None, None] * TOP_K
    ids = (start + np.arange(TOP_K)) % (per_layer // 2 * 2)
    return np.repeat(ids, LAYERS, axis=1)


def knowing(trace: Trace, right: float = 1.0, until: int = 10**9, seed: int = 1) -> Guess:
    """Names each expert asked for with this chance, otherwise another; is sure of either."""
    random = np.random.default_rng(seed)
    said: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def say(step: int, layer: int) -> list[tuple[int, float]]:
        if (step, layer) not in said:
            said[step, layer] = [
                (int(e if random.random() < right and step < until else random.integers(32)), 0.9)
                for e in trace[step, layer]
            ]
        return said[step, layer]

    return Guess(say)


def inverted(trace: Trace) -> Guess:
    return Guess(
        lambda step, layer: [
            (e, 0.9) for e in range(EXPERTS) if e not in trace[step, layer].tolist()
        ]
    )
