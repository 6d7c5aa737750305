"""Which experts follow which: learnt from the routing itself, while it happens.

For every layer a logistic regression from what was last asked for (in this layer and those before
it) to what it asks for next and the time after next. It learns by one small step a visit
(normalised least mean squares), so it needs no calibration and follows a change of subject within
some hundred tokens. Legend: L layers, E experts of the widest, R layers looked back to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from offload.policies.base import Values

REACH = 6
"""R: a layer's habits are looked for in itself and this many less one before it."""
LEARNING_RATE = 0.5
HEADS = 2
"""The next visit of a layer, and the one after it."""
MOST_BYTES = 64 << 20
"""Of weights: with very many experts, fewer layers are looked back to."""
MEMORY = 0.995
"""How much of the running losses a visit keeps."""


class Succession:
    """Learns from visits and says how likely each unit is.

    Attributes:
        losses: of each head, running log loss of predictions without and with habits.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        affordable = MOST_BYTES // (4 * HEADS * num_layers * width * width)
        self._layers, self._width = num_layers, width
        self._reach = reach = min(REACH, num_layers, max(1, affordable))
        # One row for each head, layer, distance back to a layer and expert that it asked for.
        self._weights = np.zeros((HEADS * num_layers * reach * width, width), dtype=np.float32)
        self._parts = np.zeros((HEADS, num_layers, reach, width), dtype=np.float32)
        self._visits: list[deque[tuple[int, list[int]]]] = [
            deque(maxlen=HEADS + 2) for _ in range(num_layers)
        ]
        self._backs = np.arange(reach)
        self._random = random.Random(0)
        self.losses: Values = np.zeros((HEADS, 2))

    def corrected(self, head: int, layers: int | slice | Sequence[int], usual: Values) -> Values:
        """The usual rates of some layers, moved by habits where these have predicted better.

        Args:
            head: 0 for the next visit of each layer, 1 for the one after it.
            usual: ``(..., E)``.
        """
        without, with_habits = self.losses[head]
        if with_habits >= without:
            return usual
        return sigmoid(log_odds(usual) + self._parts[head, layers].sum(axis=-2))

    def visit(
        self, call: int, layer: int, experts: Sequence[int], usual: Sequence[Values]
    ) -> list[int]:
        """A layer asks for experts.

        Args:
            call: number of this visit, counted over all layers.
            usual: for each head ``(E,)`` rates of the layer's experts, this visit not included.

        Returns:
            Layers, this one first, whose habits say something else now.
        """
        for head in range(HEADS):
            self._learn(head, call, layer, experts, usual[head])
        own = list(experts)
        self._visits[layer].append((call, own))
        targets = (layer + self._backs) % self._layers
        first = np.arange(HEADS)[:, None] * self._layers + targets
        rows = ((first * self._reach + self._backs) * self._width)[..., None] + own
        self._parts[:, targets, self._backs] = self._weights.take(rows, axis=0).sum(axis=2)
        reached: list[int] = targets.tolist()
        return reached

    def _learn(
        self, head: int, call: int, layer: int, experts: Sequence[int], usual: Values
    ) -> None:
        # What was known when this visit was still so many calls ahead; any distance that
        # `corrected` is asked at is as likely.
        ahead = self._random.randint(1, self._layers) + head * self._layers
        rows = self._rows(head, layer, call - ahead)
        if not rows:
            return
        active = self._weights.take(rows, axis=0)
        guess = sigmoid(log_odds(usual) + active.sum(axis=0))
        error = guess.astype(np.float32)
        error[experts] -= 1
        self._weights[rows] = active - error * (LEARNING_RATE / len(rows))
        voices = np.stack((usual, guess))
        right = 1 - voices
        right[:, experts] = voices[:, experts]
        self.losses[head] -= (1 - MEMORY) * (np.log(right).mean(axis=1) + self.losses[head])

    def _rows(self, head: int, layer: int, call: int) -> list[int]:
        """Of the weights, for what was known as of a call about a layer."""
        first = (head * self._layers + layer) * self._reach
        return [
            (first + back) * self._width + expert
            for back in range(self._reach)
            for expert in self._known((layer - back) % self._layers, call)
        ]

    def _known(self, layer: int, call: int) -> list[int]:
        """What a layer asked for last, as of a call."""
        return next((ids for at, ids in reversed(self._visits[layer]) if at <= call), [])


def log_odds(probability: Values) -> Values:
    odds: Values = np.log(probability / (1 - probability))
    return odds


def sigmoid(odds: Values) -> Values:
    """Kept away from 0 and 1."""
    return 1 / (1 + np.exp(-np.minimum(np.maximum(odds, -9.2), 9.2)))
