"""Which experts follow which: learnt from the routing itself, while it happens.

For every layer a logistic regression from what was last asked for (in this layer and those before
it) to what it asks for next and the time after next. It learns by one small step a visit
(normalised least mean squares), so it needs no calibration and follows a change of subject within
some hundred tokens. Legend: L layers, E experts of the widest, R layers looked back to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from offload.policies.base import Values

REACH = 6
"""R: a layer's habits are looked for in itself and this many less one before it."""
LEARNING_RATE = 0.5
HEADS = 2
"""The next visit of a layer, and the one after it."""
MEMORY = 0.995
"""How much of the running losses a visit keeps."""


class Habits:
    """Learns from visits and says how likely each unit is.

    Attributes:
        losses: ``(heads, 2)`` running log loss of predictions without and with habits.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self._layers, self._width = num_layers, width
        self._reach = min(REACH, num_layers)
        shape = HEADS, num_layers, self._reach, width
        self._weights = np.zeros((*shape, width), dtype=np.float32)
        self._parts = np.zeros(shape, dtype=np.float32)
        self._visits: list[deque[tuple[int, list[int]]]] = [
            deque(maxlen=HEADS + 2) for _ in range(num_layers)
        ]
        self._random = np.random.default_rng(0)
        self.losses = np.zeros((HEADS, 2))

    def corrected(self, head: int, layers: int | slice, usual: Values) -> Values:
        """The usual rates of some layers, moved by habits where these have predicted better.

        Args:
            head: 0 for the next visit of each layer, 1 for the one after it.
            usual: ``(..., E)``.
        """
        if self.losses[head, 1] >= self.losses[head, 0]:
            return usual
        return sigmoid(log_odds(usual) + self._parts[head, layers].sum(axis=-2))

    def visit(self, call: int, layer: int, experts: Sequence[int], usual: Values) -> None:
        """A layer asks for experts.

        Args:
            call: number of this visit, counted over all layers.
            usual: ``(E,)`` rates of the layer's experts, this visit not included.
        """
        asked = np.zeros(self._width)
        asked[experts] = 1
        base = log_odds(usual)
        for head in range(HEADS):
            # What was known when this visit was still so many calls ahead; any distance that
            # `corrected` is asked at is as likely.
            ahead = int(self._random.integers(1, self._layers + 1)) + head * self._layers
            self._learn(head, layer, call - ahead, asked, base)
        own = list(experts)
        self._visits[layer].append((call, own))
        for back in range(self._reach):
            target = (layer + back) % self._layers
            self._parts[:, target, back] = self._weights[:, target, back, own].sum(axis=1)

    def _learn(self, head: int, layer: int, call: int, asked: Values, base: Values) -> None:
        rows = [
            back * self._width + expert
            for back in range(self._reach)
            for expert in self._known((layer - back) % self._layers, call)
        ]
        if not rows:
            return
        weights = self._weights[head, layer].reshape(-1, self._width)
        active = weights[rows]
        probability = sigmoid(base + active.sum(axis=0))
        weights[rows] = active - LEARNING_RATE / len(rows) * (probability - asked)
        for which, guess in enumerate((sigmoid(base), probability)):
            loss = -np.log(np.abs(1 - asked - guess)).mean()
            self.losses[head, which] += (1 - MEMORY) * (loss - self.losses[head, which])

    def _known(self, layer: int, call: int) -> list[int]:
        """What a layer asked for last, as of a call."""
        return next((ids for at, ids in reversed(self._visits[layer]) if at <= call), [])


def log_odds(probability: Values) -> Values:
    odds: Values = np.log(probability / (1 - probability))
    return odds


def sigmoid(odds: Values) -> Values:
    """Kept away from 0 and 1."""
    return np.clip(1 / (1 + np.exp(-odds)), 1e-4, 1 - 1e-4)
