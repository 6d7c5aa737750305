"""How many distinct experts a pass visits, and how many of them are missing: measured, not assumed.

Uniform routing is a bound; real models visit fewer, and the gap is what speculation lives on
Legend: B sequences of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Protocol

import numpy as np

Counts = tuple[float, float]
"""Distinct experts that a pass visited in all layers, and those of them not in memory."""

FOLLOW = 0.1
"""Weight of the last pass in what is known of hits: texts change what is in memory."""


class Counter(Protocol):
    """Counts the experts of a step."""

    def start(self) -> None: ...

    def read(self) -> Counts | None:
        """Since `start`; None where it does not know."""
        ...


@dataclass(frozen=True)
class Sizes:
    """A model's experts.

    Attributes:
        experts: of all layers together.
        visits: of one token in all layers: the sum of K.
        slots: experts that are in memory; all of them without offload.
    """

    experts: int
    visits: float
    slots: int

    @property
    def resident(self) -> float:
        return min(self.slots / self.experts, 1.0)


class Coverage:
    """Distinct experts of a pass, and those of them that are not in memory.

    The rows of a pass are worth fewer independent ones, ``B^a * (rows / B)^b``: rows of different
    sequences, and neighbours in one, go to the same experts more often than chance would have it.
    Both exponents are fitted; then uniform routing's law holds.

    Attributes:
        exponents: a and b.
        hits: share of one token's experts that are in memory.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.exponents = (0.9, 0.8)
        self.hits = sizes.resident
        self._share = min(sizes.visits / sizes.experts, 1 - 1e-9)
        self._gram = np.eye(2)
        self._moment = np.array(self.exponents)

    def independent(self, sequences: int, rows: float) -> float:
        """Rows of uniform routing that would visit as many experts."""
        a, b = self.exponents
        return sequences**a * (rows / sequences) ** b

    def distinct(self, sequences: int, rows: float) -> float:
        """Experts of all layers that a pass visits."""
        return self.sizes.experts * self._covered(self._share, self.independent(sequences, rows))

    def missing(self, sequences: int, rows: float) -> float:
        """Those of them that have to be fetched."""
        return self._missing(self.hits, self.independent(sequences, rows))

    def missing_instead(self, sequences: int, rows: int, missing: float) -> float:
        """Experts that one row of each sequence would have missed, where so many were missing."""
        if self.sizes.resident == 1:
            return 0.0
        hits = self._share_of_hits(self.independent(sequences, rows), missing)
        return self._missing(hits, self.independent(sequences, sequences))

    def follow(self, sequences: int, rows: int, missing: float, passes: int = 1) -> None:
        """So many experts of a pass, or of several on average, were not in memory."""
        if self.sizes.resident < 1:
            recent = 1 - (1 - FOLLOW) ** passes
            hits = self._share_of_hits(self.independent(sequences, rows), missing)
            self.hits += recent * (hits - self.hits)

    def observe(self, sequences: int, rows: int, distinct: float) -> None:
        """So many experts a pass, or several on average, really visited."""
        covered = min(distinct / self.sizes.experts, 1 - 1e-3)
        worth = log(1 - covered) / log(1 - self._share)
        if rows > 1 and worth > 0:
            x = np.array([log(sequences), log(rows / sequences)])
            self._gram = 0.98 * self._gram + np.outer(x, x) + 0.002 * np.eye(2)
            self._moment = 0.98 * self._moment + x * log(worth) + 0.002 * np.array(self.exponents)
            a, b = np.clip(np.linalg.solve(self._gram, self._moment), 0.05, 1.2).tolist()
            self.exponents = a, b

    def _missing(self, hits: float, worth: float) -> float:
        away = 1 - self.sizes.resident
        if away <= 0:
            return 0.0
        share = min((1 - hits) * self._share / away, 1 - 1e-9)
        return self.sizes.experts * away * self._covered(share, worth)

    def _share_of_hits(self, worth: float, missing: float) -> float:
        """The hit share at which so many would be missing."""
        away = 1 - self.sizes.resident
        covered = min(missing / (self.sizes.experts * away), 1 - 1e-9)
        lost = 1 - (1 - covered) ** (1 / max(worth, 1e-9))
        return min(max(1 - lost * away / self._share, 0.0), 1.0)

    @staticmethod
    def _covered(share: float, worth: float) -> float:
        return 1 - exp(worth * log(1 - share))
