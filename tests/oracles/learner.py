"""What `offload.policies.learned` learns, in numpy: the oracle of kernels/cpu/learning.cpp."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from offload.policies.base import Values
from offload.policies.learned import (
    AT_FIRST,
    CYCLE_DISCOUNT,
    FIRST_RATE,
    HABIT_RATE,
    HALF_LIVES,
    HEADS,
    KEEP,
    LEARNING_RATE,
    MARGIN,
    MEMORY,
    LearnedCall,
    discounts,
    reach_of,
)

Layers = int | slice | Sequence[int]
"""One, all, or some."""


class ReferenceLearner:
    """In numpy. Worths are kept, and found again for those that something was learnt of."""

    def __init__(self, num_layers: int, width: int, *, transitions: bool) -> None:
        self._width, self._discounts = width, discounts(num_layers)
        self._rates = Rates(num_layers, width)
        self._succession = Succession(num_layers, width) if transitions else None
        self._worth = self._rates.worth(slice(None), self._rates.both)

    @property
    def tails(self) -> Values:
        return self._rates.tails

    def learn(self, news: Sequence[LearnedCall], layer: int) -> Values:
        layers: set[int] = set()
        for call, ahead, units in news:
            at = units[0] // self._width
            experts, usual = [unit % self._width for unit in units], self._rates.both[:, at]
            layers.add(at)
            if self._succession is not None:
                layers.update(self._succession.visit(call, ahead, at, experts, usual))
            self._rates.visit(at, experts)
        rows = sorted(layers)
        coming = self._rates.both[:, rows]
        if self._succession is not None:
            coming = self._succession.corrected(rows, coming)
        self._worth[rows] = self._rates.worth(rows, coming)
        return (self._discounts[layer][:, None] * self._worth).reshape(-1)


class Rates:
    """Of each unit, how often it is asked for when its layer comes.

    Attributes:
        rates: ``(L, width)``, at the next visit of each layer.
        usual: the same at later visits, of which short memories know nothing.
        both: ``(2, L, width)``, the two.
        tails: ``(L, width)``, what uses at the usual rates are worth, of which the next could come
            at once.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self.both: Values = np.full((2, num_layers, width), FIRST_RATE)
        self.rates, self.usual = self.both
        self._memories: Values = np.full((num_layers, len(HALF_LIVES), width), FIRST_RATE)
        self._weights: Values = np.array(AT_FIRST)
        self.tails = _tail(self.usual)
        self._visits = [0] * num_layers

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        self._visits[layer] += 1
        # The first visits are averaged evenly, else the start would be remembered for long.
        keep = np.minimum(KEEP, 1 - 1 / (self._visits[layer] + 1))[:, None]
        memories, both = self._memories[layer], self.both[:, layer]
        # Expectation maximisation: whose word was it?
        shares = self._weights[:, None] * memories[:, experts]
        shares /= np.add.reduce(shares, axis=0) + 1e-12
        told = np.add.reduce(shares, axis=1) / len(experts)
        self._weights += LEARNING_RATE * (told - self._weights)
        memories *= keep
        memories[:, experts] += 1 - keep
        both[0], both[1] = self._weights @ memories, memories[0]
        np.minimum(np.maximum(both, 1e-3, out=both), 0.999, out=both)
        self.tails[layer] = _tail(self.usual[layer])

    def worth(self, layers: Layers, coming: Values) -> Values:
        """``(..., width)``: what uses are worth, of which the next could come at once.

        Args:
            layers: whose units.
            coming: probabilities ``(2, ..., width)`` of a use at the next visit of each layer and
                at the one after it; later ones have the probability `usual`.
        """
        tail: Values = self.tails[layers]
        for probability in reversed(coming):
            tail = probability + (1 - probability) * CYCLE_DISCOUNT * tail
        return tail


def _tail(rates: Values) -> Values:
    return rates / (1 - (1 - rates) * CYCLE_DISCOUNT)


class Succession:
    """Learns from visits and says how likely each unit is.

    Attributes:
        losses: of each head, running log loss of predictions without and with transitions.
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
        """The usual rates of some layers, moved by transitions where these have predicted better.

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
            Layers, this one first, whose transitions say something else now.
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
        transitions = np.array([np.add.reduce(own, axis=0) for own in of_head])
        asked = np.zeros(self._width)
        asked[experts] = 1
        error = np.array((usual, sigmoid(log_odds(usual) + transitions))) - asked
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
