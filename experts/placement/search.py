"""The search for a more even placement: `improve` makes changes while they pay for their moves.

A change exchanges experts between two ranks, or gives a copy's slot to another expert. On few ranks
the search anneals; on more it takes the most promising changes as long as the mean falls.

Legend: S steps, E experts, R ranks, N slots of a rank, M sets of ranks with the empty one, C
without it, K experts that a change concerns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experts.placement.evenness import (
    MOST_RANKS,
    SWEEPS,
    fee,
    heaviest,
    parts_of,
    sets_of,
    share_by_price,
)
from experts.placement.placement import Floats, Ints

MAX_ROUNDS = 200
TRIALS = 24
"""Most promising changes of each kind that are judged exactly before the search ends."""
WORTH = 2e-4
"""Least share by which a change must lower the mean of the heaviest load."""
PROPOSALS, MOST_PROPOSALS = 200, 8_000
"""Proposals of the annealing: for each slot, and in all."""
GIFTS = 0.4
"""Share of the proposals that give a copy's slot to another expert; the others exchange two."""
HOT, COLD = 1e-2, 3e-4
"""Temperatures at the start and the end, as shares of the mean load."""

Change = tuple[tuple[int, int, int], ...]
"""Expert, rank, and copies more or less there."""
_CutChange = tuple[tuple[int, int, int], ...]
"""Slots that change: rank, slot of the rank, new expert."""


def improve(home_ER: Ints, costs_SE: Floats, price_E: Floats) -> Ints:
    """Make changes that pay for their moves until none is found or loads are level."""
    value, level = heaviest(costs_SE, home_ER), costs_SE.sum(1).mean() / home_ER.shape[1]
    if value <= level * (1 + WORTH):
        return home_ER
    if home_ER.shape[1] <= MOST_RANKS:
        found_ER = anneal(home_ER, costs_SE, price_E)
        lower = heaviest(costs_SE, found_ER) + fee(found_ER, home_ER, price_E)
        return found_ER if lower <= value * (1 - WORTH) else home_ER
    copies_ER = home_ER
    for _ in range(MAX_ROUNDS):
        for changed_ER in _changes(copies_ER, costs_SE):
            lower = heaviest(costs_SE, changed_ER) + fee(changed_ER, home_ER, price_E)
            if lower <= value * (1 - WORTH):
                value, copies_ER = lower, changed_ER
                break
        else:
            break
    return copies_ER


def _changes(copies_ER: Ints, costs_SE: Floats) -> Iterator[Ints]:
    """Changed placements, most promising first, estimated with the other experts' shares kept."""
    shares_SER = share_by_price(costs_SE, copies_ER, SWEEPS)
    loads_SR = shares_SER.sum(1)
    rank = int((loads_SR >= loads_SR.max(1, keepdims=True)).mean(0).argmax())
    for candidates in (_exchanges, _replacements):
        found = list(candidates(copies_ER, shares_SER, loads_SR, rank))
        for _, change in sorted(found, key=lambda one: one[0])[:TRIALS]:
            changed_ER = copies_ER.copy()
            for expert, at, by in change:
                changed_ER[expert, at] += by
            yield changed_ER


def _exchanges(
    copies_ER: Ints, shares_SER: Floats, loads_SR: Floats, rank: int
) -> Iterator[tuple[float, Change]]:
    """Exchange an expert of the heaviest rank for one of another; with the growth of unevenness."""
    for expert in np.flatnonzero(copies_ER[:, rank]).tolist():
        for other in np.flatnonzero(copies_ER[expert] == 0).tolist():
            back = np.flatnonzero((copies_ER[:, other] > 0) & (copies_ER[:, rank] == 0))
            moved_SN = shares_SER[:, expert, rank, None] - shares_SER[:, back, other]
            gap_S = loads_SR[:, rank] - loads_SR[:, other]
            growth_N = (moved_SN * (moved_SN - gap_S[:, None])).mean(0)
            for partner, growth in zip(back.tolist(), growth_N, strict=True):
                there = ((expert, rank, -1), (expert, other, 1))
                yield float(growth), (*there, (partner, other, -1), (partner, rank, 1))


def _replacements(
    copies_ER: Ints, shares_SER: Floats, loads_SR: Floats, rank: int
) -> Iterator[tuple[float, Change]]:
    """Replace a copy elsewhere by one of an expert of the heaviest rank."""
    for spare, other in np.argwhere(copies_ER * (copies_ER.sum(1, keepdims=True) > 1)).tolist():
        after_SR = loads_SR.copy()
        rest = np.flatnonzero((copies_ER[spare] > 0) & (np.arange(copies_ER.shape[1]) != other))
        after_SR[:, other] -= shares_SER[:, spare, other]
        after_SR[:, rest] += shares_SER[:, spare, other, None] / len(rest)
        grown = (after_SR**2).sum(1) - (loads_SR**2).sum(1)
        helped = np.flatnonzero((copies_ER[:, rank] > 0) & (copies_ER[:, other] == 0))
        gap_S = (after_SR[:, rank] - after_SR[:, other]).clip(0.0)
        moved_SN = np.minimum(shares_SER[:, helped, rank], gap_S[:, None] / 2)
        growth_N = (grown[:, None] / 2 + moved_SN * (moved_SN - gap_S[:, None])).mean(0)
        for expert, growth in zip(helped.tolist(), growth_N, strict=True):
            if expert != spare:
                yield float(growth), ((spare, other, -1), (expert, other, 1))


def anneal(copies_ER: Ints, costs_SE: Floats, price_E: Floats) -> Ints:
    """The best placement found by simulated annealing from here; deterministic.

    Args:
        copies_ER: at most one of an expert on a rank.
        costs_SE: what each expert costs in each step.
        price_E: of each copy that a rank does not hold at the start.
    """
    state = _Annealing(copies_ER, costs_SE, price_E)
    best, found_ER = state.value, copies_ER
    rng = np.random.default_rng(0)
    proposals = min(PROPOSALS * int(copies_ER.sum()), MOST_PROPOSALS)
    for heat in np.geomspace(HOT, COLD, proposals) * state.level:
        change = state.proposal(rng)
        made = change and state.make(change, worse=-heat * np.log(1.0 - rng.random()))
        if made and state.value < best:
            best, found_ER = state.value, state.copies_ER
    return found_ER


class _Annealing:
    """The placement that the annealing is at.

    Attributes:
        level: mean load of a rank.
        value: mean over the steps of the heaviest load, plus the price of the moves so far.
    """

    def __init__(self, copies_ER: Ints, costs_SE: Floats, price_E: Floats) -> None:
        self._costs_SE, self._price_E, self._home_E = costs_SE, price_E, sets_of(copies_ER)
        self._parts_MC = parts_of(copies_ER.shape[1])
        self._slots_RN = np.nonzero(copies_ER.T)[1].reshape(copies_ER.shape[1], -1).tolist()
        self._sets: list[int] = self._home_E.tolist()
        self._loads_SC = costs_SE @ self._parts_MC[self._home_E]
        self._fee = 0.0
        self.level = float(costs_SE.sum(1).mean()) / copies_ER.shape[1]
        self.value = float(self._loads_SC.max(1).mean())

    @property
    def copies_ER(self) -> Ints:
        sets_E = np.array(self._sets, np.int64)
        return (sets_E[:, None] >> np.arange(len(self._slots_RN))) & 1

    def proposal(self, rng: np.random.Generator) -> _CutChange:
        """A random change; empty if the draw is not a possible one."""
        ranks, rows = len(self._slots_RN), len(self._slots_RN[0])
        draws = rng.random(5).tolist()
        rank, slot = int(draws[1] * ranks), int(draws[2] * rows)
        expert = self._slots_RN[rank][slot]
        if draws[0] < GIFTS:
            taker, held = int(draws[3] * len(self._sets)), self._sets[expert]
            alone = held & (held - 1) == 0
            return () if alone or self._sets[taker] >> rank & 1 else ((rank, slot, taker),)
        other, place = int(draws[3] * ranks), int(draws[4] * rows)
        partner = self._slots_RN[other][place]
        if self._sets[expert] >> other & 1 or self._sets[partner] >> rank & 1:
            return ()
        return (rank, slot, partner), (other, place, expert)

    def make(self, change: _CutChange, worse: float) -> bool:
        """Make the change unless the value grows by more than `worse`; returns whether it did."""
        sets: dict[int, int] = {}
        for rank, slot, comes in change:
            for expert in (self._slots_RN[rank][slot], comes):
                sets[expert] = sets.get(expert, self._sets[expert]) ^ (1 << rank)
        experts, after = list(sets), list(sets.values())
        before = [self._sets[expert] for expert in experts]
        moved_KC = self._parts_MC[after] - self._parts_MC[before]
        loads_SC = self._loads_SC + self._costs_SE[:, experts] @ moved_KC
        fee = self._fee
        for expert, old, new in zip(experts, before, after, strict=True):
            away = ~int(self._home_E[expert])
            copies = (new & away).bit_count() - (old & away).bit_count()
            fee += float(self._price_E[expert]) * copies
        value = float(loads_SC.max(1).mean()) + fee
        if value > self.value + worse:
            return False
        self._loads_SC, self._fee, self.value = loads_SC, fee, value
        for expert, new in sets.items():
            self._sets[expert] = new
        for rank, slot, comes in change:
            self._slots_RN[rank][slot] = comes
        return True
