"""What calibration has learnt of next uses, at work beside a cache: compiled where that builds,
else in numpy, which it must equal.

It corrects each unit's log-odds by what it was wrong by before, so that a text with favourites of
its own is followed. What hidden units sum up is changed by what is new, not summed anew.
Legend as in offload/policies/next_use.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from kernels.cpu import choose_kernel
from offload.policies.base import KEEP, LEAST_ODDS, Heard, Values, log_odds
from offload.policies.next_use import DISCOUNT, NextUse
from routing.predict.forecast import Floats, floats
from routing.predict.lookahead import sigmoid

CORRECTION = 0.02
"""How much of an error corrects a unit's log-odds."""
SPEAKS = 8
"""Times a pass over the layers that all units are valued anew; in between, those of the layers that
have been."""

Visit = tuple[int, Sequence[int]]
"""A layer, and the experts that it asks for."""


class Arithmetic(Protocol):
    """Of the network."""

    @property
    def soon(self) -> Floats:
        """``(L, W)``, live: how soon each unit is asked for."""
        ...

    def hear(self, layer: int, row: Floats, scores: Floats | None) -> None:
        """A router has read a row ``(H,)``, to which it gave these ``(E,)``; None: find them."""
        ...

    def foresee(
        self, news: Sequence[Visit], learning: Values, discounts: Values, *, whole: bool
    ) -> None:
        """Take in visits, the last of which was just now, and make `soon` new.

        Args:
            news: at least one.
            learning: ``(L * W,)``, what units are worth by who learns on the way.
            discounts: ``(L,)``, what of this is due to when their layers come.
            whole: of all layers, not only of those that have been.
        """
        ...


def new_arithmetic(learnt: NextUse) -> Arithmetic:
    native, _ = choose_kernel()
    if native is None:
        return Reference(learnt)
    return native.foresight(
        learnt.num_experts,
        **learnt.arrays,
        keep=KEEP,
        discount=DISCOUNT,
        correction=CORRECTION,
        least=LEAST_ODDS,
    )


class Reference:
    """In numpy."""

    def __init__(self, learnt: NextUse) -> None:
        layers, width = learnt.usual.shape
        self._learnt, self._heard = learnt, Heard(learnt.usual, learnt.gates.shape[-1])
        ends = np.cumsum([layers * width, layers * width, learnt.gates.shape[-1]])
        now, before, self._up_row, self._up_layer = np.split(learnt.up, ends)
        self._up_now, self._up_before = (own.reshape(layers, width, -1) for own in (now, before))
        self._sums = learnt.up_bias.copy()
        self._drift, self.soon = np.zeros_like(learnt.usual), learnt.usual.copy()

    def hear(self, layer: int, row: Floats, scores: Floats | None) -> None:
        heard, learnt, experts = self._heard, self._learnt, self._learnt.num_experts[layer]
        if scores is None:
            scores = learnt.gates[layer, :experts] @ row + learnt.gate_bias[layer, :experts]
        older, last = heard.before[layer].copy(), heard.row.copy()
        heard.listen(layer, scores, row)
        before = heard.before[layer]
        self._sums += (heard.scores[layer] - before) @ self._up_now[layer]
        self._sums += (before - older) @ self._up_before[layer]
        if layer == len(heard.scores) - 1:
            self._sums += (heard.row - last) @ self._up_row

    def foresee(
        self, news: Sequence[Visit], learning: Values, discounts: Values, *, whole: bool
    ) -> None:
        for layer, experts in news:
            self._heard.visit(layer, experts)
        last = dict(news)
        layers = list(range(len(self.soon))) if whole else sorted(last)
        worth = learning.reshape(self.soon.shape) / discounts[:, None]
        odds = self._odds(layers, log_odds(worth.astype(np.float32)))
        for layer, experts in last.items():
            drift, own = self._drift[layer], odds[layers.index(layer)]
            # A use now, else as soon as is now believed (temporal difference).
            target = DISCOUNT * sigmoid(own + drift)
            target[experts] = 1
            drift += CORRECTION * (target - self.soon[layer])
        self.soon[layers] = sigmoid(odds + self._drift[layers])

    def _odds(self, layers: list[int], learning: Floats) -> Floats:
        learnt, heard = self._learnt, self._heard
        said = np.concatenate([heard.memories[:, layers], learning[None, layers]])
        odds: Floats = np.add.reduce(learnt.shares[:, heard.layer, layers, None] * said)
        hidden = gelu(self._sums + self._up_layer[heard.layer])
        odds += learnt.down[layers] @ hidden + learnt.down_bias[layers]
        return odds


class Foresight:
    """Follows one cache's calls.

    Args:
        learnt: what it goes by.
    """

    def __init__(self, learnt: NextUse) -> None:
        layers = len(learnt.num_experts)
        self._arithmetic = new_arithmetic(learnt)
        # All hits for long: nobody asks, and what is old is not learnt at all.
        self._news: deque[Visit] = deque(maxlen=16 * layers)
        self._period, self._rest, self._rows = max(1, layers // SPEAKS), 0, 0

    @property
    def speaks(self) -> bool:
        """Whether one row came last: the token of one sequence, so what was heard leads to the
        next."""
        return self._rows == 1

    def hear(self, layer: int, rows: Tensor) -> None:
        """A layer's router has read rows ``(T, H)``; the last is the latest of its sequence."""
        self._rows = len(rows)
        if self._rows:
            self._arithmetic.hear(layer, floats(rows[-1]), None)

    def listen(self, layer: int, scores: Floats, row: Floats) -> None:
        """The same of one row ``(H,)``, with what the router gave it, ``(E,)``."""
        self._rows = 1
        self._arithmetic.hear(layer, row, scores)

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """It asks for these."""
        self._news.append((layer, experts))
        self._rest -= 1

    def soon(self, learning: Values, discounts: Values) -> Floats:
        """``(L, W)``, live: how soon each unit is asked for.

        Args:
            learning: ``(L * W,)``, what units are worth by who learns on the way.
            discounts: ``(L,)``, what of this is due to when their layers come.
        """
        if self._news:
            whole = self._rest <= 0
            if whole:
                self._rest = self._period
            self._arithmetic.foresee(self._news, learning, discounts, whole=whole)
            self._news.clear()
        return self._arithmetic.soon

    def tail(self, layer: int, expert: int) -> float:
        """What a unit's uses are worth whose next is not at once, as of the last `soon`."""
        return DISCOUNT * float(self._arithmetic.soon[layer, expert])


def gelu(x: Floats) -> Floats:
    """By tanh, as the network learns with."""
    found: Floats = 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + 0.044715 * x * x * x)))
    return found
