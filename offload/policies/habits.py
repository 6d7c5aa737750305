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
from itertools import pairwise

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


class Habits:
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
        self.losses = [[0.0, 0.0] for _ in range(HEADS)]

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

    def visit(self, call: int, layer: int, experts: Sequence[int], usual: Sequence[Values]) -> None:
        """A layer asks for experts.

        Args:
            call: number of this visit, counted over all layers.
            usual: for each head ``(E,)`` rates of the layer's experts, this visit not included.
        """
        self._learn(call, layer, experts, usual)
        own = list(experts)
        self._visits[layer].append((call, own))
        targets = (layer + self._backs) % self._layers
        first = np.arange(HEADS)[:, None] * self._layers + targets
        rows = ((first * self._reach + self._backs) * self._width)[..., None] + own
        self._parts[:, targets, self._backs] = self._weights.take(rows, axis=0).sum(axis=2)

    def _learn(
        self, call: int, layer: int, experts: Sequence[int], usual: Sequence[Values]
    ) -> None:
        heads: list[int] = []
        rows: list[int] = []
        starts: list[int] = []
        for head in range(HEADS):
            # What was known when this visit was still so many calls ahead; any distance that
            # `corrected` is asked at is as likely.
            ahead = self._random.randint(1, self._layers) + head * self._layers
            if known := self._rows(head, layer, call - ahead):
                heads.append(head)
                starts.append(len(rows))
                rows += known
        if not rows:
            return
        counts = [end - start for start, end in pairwise([*starts, len(rows)])]
        index = np.array(rows)
        active = self._weights.take(index, axis=0)
        sums = np.stack([part.sum(axis=0) for part in np.split(active, starts[1:])])
        known_usual = np.stack([usual[head] for head in heads])
        guesses = sigmoid(log_odds(known_usual) + sums)
        errors = guesses.astype(np.float32)
        errors[:, experts] -= 1
        for error, count in zip(errors, counts, strict=True):
            error *= LEARNING_RATE / count
        active -= errors.repeat(counts, axis=0)
        self._weights[index] = active
        losses = _losses(np.concatenate([known_usual, guesses]), experts)
        for head, *found in zip(heads, losses, losses[len(heads) :], strict=False):
            for running, loss in enumerate(found):
                self.losses[head][running] += (1 - MEMORY) * (loss - self.losses[head][running])

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


def _losses(guesses: Values, asked: Sequence[int]) -> list[float]:
    """Mean log loss of each of ``(G, E)`` guesses."""
    unlike = 1 - guesses
    unlike[:, asked] = guesses[:, asked]
    losses: list[float] = (np.log(unlike).sum(axis=1) / -guesses.shape[1]).tolist()
    return losses


def log_odds(probability: Values) -> Values:
    odds: Values = np.log(probability / (1 - probability))
    return odds


def sigmoid(odds: Values) -> Values:
    """Kept away from 0 and 1."""
    return 1 / (1 + np.exp(-odds.clip(-9.2, 9.2)))
