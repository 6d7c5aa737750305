"""What a policy is: it watches what is asked for and says what each unit is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from routing.predict.forecast import Floats

Values = NDArray[np.float64]


class Policy(Protocol):
    """Values units; the cache evicts the least valuable and keeps out what is worth less still.

    A unit is an expert of a layer, numbered ``layer * width + expert``.
    """

    @property
    def name(self) -> str: ...

    def touch(self, layer: int, units: Sequence[int]) -> None:
        """A call of a layer asks for these units; once a call, in the order of the layers. A layer
        waits for what comes behind this, so it takes note and learns when `values` are wanted."""
        ...

    def values(self) -> Values:
        """``(units,)``: what each unit is worth keeping now, comparable between layers. Read it
        before the next call of any method."""
        ...

    def bid(self, unit: int, probability: float) -> float:
        """What a unit that is asked for with this probability when its layer comes next is worth
        prefetching, on the scale of `values`."""
        ...


# ---- What is known behind a visit of a layer: of each unit how often it was asked for of late,
# of the token what the routers said.
#
# Legend: L layers, W experts of the widest, U = L * W units, F memories, H hidden, D hidden
# units.

HALF_LIVES = (1.5, 5.0, 20.0, 80.0, 300.0)
"""Of each memory: visits of a layer after which one counts half."""
LEAST_ODDS = 1e-3
"""Probabilities are kept so far from 0 and 1."""
KEEP = (0.5 ** (1 / np.array(HALF_LIVES))).astype(np.float32)


class Heard:
    """Follows one cache's calls.

    Attributes:
        memories: ``(F, L, W)`` log-odds that a unit is asked for at a visit of its layer, by means
            over `HALF_LIVES`.
        scores, before: ``(L, W)``, what each layer's router gave its experts, less their mean, for
            the last token and for the one before.
        row: ``(H,)``, what the last layer's experts read last.
        layer: the one that has just been; -1 at first.

    Args:
        usual: ``(L, W)``, how often each unit is asked for, where nothing has been seen yet.
        hidden: H.
    """

    def __init__(self, usual: Floats, hidden: int) -> None:
        self._means = np.repeat(usual[None], len(HALF_LIVES), 0)
        self.memories = log_odds(self._means)
        self.scores, self.before = np.zeros_like(usual), np.zeros_like(usual)
        self.row = np.zeros(hidden, np.float32)
        self._visits, self.layer = [0] * len(usual), -1

    def listen(self, layer: int, scores: Floats, row: Floats) -> None:
        """A layer's router has scored ``(E,)`` its experts for a row ``(H,)``."""
        self.before[layer] = self.scores[layer]
        self.scores[layer, : len(scores)] = scores - scores.mean()
        if layer == len(self.scores) - 1:
            self.row[:] = row

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """It asks for these."""
        self.layer = layer
        self._visits[layer] += 1
        # The first visits are averaged evenly, else the start would be remembered for long.
        keep = np.minimum(KEEP, 1 - 1 / (self._visits[layer] + 1))[:, None]
        means = self._means[:, layer]
        means *= keep
        means[:, experts] += 1 - keep
        self.memories[:, layer] = log_odds(means)

    def context(self) -> Floats:
        """``(C,)``, C = 2 U + H + L: scores, those before, the row, and which layer has been."""
        layer = np.arange(len(self.scores)) == self.layer
        parts = self.scores.ravel(), self.before.ravel(), self.row, layer
        return np.concatenate(parts, dtype=np.float32)


def log_odds(probability: Floats) -> Floats:
    kept = np.minimum(np.maximum(probability, LEAST_ODDS), 1 - LEAST_ODDS)
    odds: Floats = np.log(kept / (1 - kept))
    return odds
