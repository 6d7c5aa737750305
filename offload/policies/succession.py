"""Which experts follow which: learnt from the routing itself, while it happens.

For every layer a logistic regression from what was last asked for (in this layer and those before
it) to what it asks for next and the time after next. It learns by one small step a visit
(normalised least mean squares), so it needs no calibration and follows a change of subject within
some hundred tokens. Legend: L layers, E experts of the widest, R layers looked back to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from offload.policies.base import Values

REACH = 6
"""R: a layer's habits are looked for in itself and this many less one before it."""
HABIT_RATE = 0.5
"""How much of its error a visit takes from the habits that spoke."""
HEADS = 2
"""The next visit of a layer, and the one after it."""
MOST_BYTES = 64 << 20
"""Of weights: with very many experts, fewer layers are looked back to."""
MEMORY = 0.995
"""How much of the running losses a visit keeps."""
MARGIN = 1e-9
"""By which a running loss must be less to count as less: rounding is not."""


def reach_of(num_layers: int, width: int) -> int:
    """R for a model."""
    affordable = MOST_BYTES // (4 * HEADS * num_layers * width * width)
    return min(REACH, num_layers, max(1, affordable))


class Succession:
    """Learns from visits and says how likely each unit is.

    Attributes:
        losses: of each head, running log loss of predictions without and with habits.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self._layers, self._width = num_layers, width
        self._reach = reach = reach_of(num_layers, width)
        # One row for each head, layer, distance back to a layer and expert that it asked for.
        self._weights = np.zeros((HEADS * num_layers * reach * width, width), dtype=np.float32)
        self._parts = np.zeros((HEADS, num_layers, reach, width), dtype=np.float32)
        self._visits: list[deque[tuple[int, list[int]]]] = [
            deque(maxlen=HEADS + 2) for _ in range(num_layers)
        ]
        backs = np.arange(reach)
        # Of each layer: who looks back at it, and the first of these rows of weights and of parts.
        self._targets = (np.arange(num_layers)[:, None] + backs) % num_layers
        heads = np.arange(HEADS)[:, None] * num_layers
        self._firsts = (heads + self._targets[:, None]) * reach + backs
        self.losses: Values = np.zeros((HEADS, 2))

    def corrected(self, layers: int | slice | Sequence[int], usual: Values) -> Values:
        """The usual rates of some layers, moved by habits where these have predicted better.

        Args:
            usual: ``(HEADS, ..., E)``, at the next visit of each layer and at the one after it.
        """
        better = self.losses[:, 1] < self.losses[:, 0] - MARGIN
        if not better.any():
            return usual
        moved = sigmoid(log_odds(usual) + np.add.reduce(self._parts[:, layers], axis=-2))
        moved[~better] = usual[~better]
        return moved

    def visit(
        self, call: int, ahead: Sequence[int], layer: int, experts: Sequence[int], usual: Values
    ) -> list[int]:
        """A layer asks for experts.

        Args:
            call: number of this visit, counted over all layers.
            ahead: of each head, how many calls before this one it is to foretell it.
            usual: ``(HEADS, E)`` rates of the layer's experts, this visit not included.

        Returns:
            Layers, this one first, whose habits say something else now.
        """
        self._learn(call, ahead, layer, experts, usual)
        self._visits[layer].append((call, list(experts)))
        firsts = self._firsts[layer]
        rows = firsts[..., None] * self._width + np.asarray(experts, dtype=np.int64)
        parts = self._parts.reshape(-1, self._width)
        parts[firsts] = np.add.reduce(self._weights.take(rows, axis=0), axis=2)
        reached: list[int] = self._targets[layer].tolist()
        return reached

    def _learn(
        self, call: int, ahead: Sequence[int], layer: int, experts: Sequence[int], usual: Values
    ) -> None:
        """All heads at once: what this costs is calls of numpy, not arithmetic."""
        rows: list[int] = []
        ends = [0]
        for head, before in enumerate(ahead):
            rows += self._rows(head, layer, call - before)
            ends.append(len(rows))
        known = np.array(rows, dtype=np.int64)
        active = self._weights.take(known, axis=0)
        of_head = [active[start:end] for start, end in pairwise(ends)]
        habits = np.array([np.add.reduce(own, axis=0) for own in of_head])
        asked = np.zeros(self._width)
        asked[experts] = 1
        error = np.array((usual, sigmoid(log_odds(usual) + habits))) - asked
        for own, wrong in zip(of_head, error[1].astype(np.float32), strict=True):
            own -= wrong * (HABIT_RATE / max(1, len(own)))
        self._weights[known] = active
        right = np.log(1 - np.abs(error))
        self.losses -= (1 - MEMORY) * (np.add.reduce(right, axis=-1).T / self._width + self.losses)

    def _rows(self, head: int, layer: int, call: int) -> list[int]:
        """Of the weights, for what each layer asked for last, as of a call about a layer."""
        rows: list[int] = []
        first = (head * self._layers + layer) * self._reach * self._width
        for back in range(self._reach):
            for at, experts in reversed(self._visits[layer - back]):
                if at <= call:
                    rows += [first + expert for expert in experts]
                    break
            first += self._width
        return rows


def log_odds(probability: Values) -> Values:
    odds: Values = np.log(probability / (1 - probability))
    return odds


def sigmoid(odds: Values) -> Values:
    """Kept away from 0 and 1."""
    return 1 / (1 + np.exp(-np.minimum(np.maximum(odds, -9.2), 9.2)))
