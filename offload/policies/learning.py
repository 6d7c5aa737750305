"""What policies learn by: compiled where that builds, else in numpy, which it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kernels.cpu import choose_kernel
from offload.policies.base import Values
from offload.policies.rates import (
    AT_FIRST,
    CYCLE_DISCOUNT,
    FIRST_RATE,
    KEEP,
    LEARNING_RATE,
    Rates,
    discounts,
)
from offload.policies.succession import HABIT_RATE, HEADS, MARGIN, MEMORY, Succession, reach_of

Call = tuple[int, Sequence[int], Sequence[int]]
"""Its number; how many calls before it each head is to foretell it; the units asked for, ascending,
of one layer, at least one."""


class Learner(Protocol):
    """Learns from calls what units are worth."""

    @property
    def tails(self) -> Values:
        """As `Rates.tails`, live."""
        ...

    def learn(self, news: Sequence[Call], layer: int) -> Values:
        """``(units,)``: what each is worth keeping behind these calls, if a layer has just been;
        the next call may write over it."""
        ...


def new_learner(num_layers: int, width: int, *, habits: bool) -> Learner:
    """Of rates, and of `Succession` where habits are to be learnt."""
    native, _ = choose_kernel()
    if native is None:
        return ReferenceLearner(num_layers, width, habits=habits)
    return native.learner(
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


class ReferenceLearner:
    """In numpy. Worths are kept, and found again for those that something was learnt of."""

    def __init__(self, num_layers: int, width: int, *, habits: bool) -> None:
        self._width, self._discounts = width, discounts(num_layers)
        self._rates = Rates(num_layers, width)
        self._succession = Succession(num_layers, width) if habits else None
        self._worth = self._rates.worth(slice(None), self._rates.both)

    @property
    def tails(self) -> Values:
        return self._rates.tails

    def learn(self, news: Sequence[Call], layer: int) -> Values:
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
