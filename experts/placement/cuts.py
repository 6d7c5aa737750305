"""The most level placement on few ranks: loads judged exactly, and slots exchanged by annealing.

Whoever shares out the tokens, ranks that alone hold some experts serve all tokens of these: the
heaviest rank of a set is at least as heavy as their load over the number of ranks. The largest of
these bounds over all sets of ranks is also reached (largest flow, least cut), so sharing by price
need not be played to know what it comes to, and what an exchange of two slots changes is two
experts' part in each set. There are ``2^R - 1`` sets, so this is for few ranks.

Legend: S steps, E experts, R ranks, N slots of a rank, M sets of ranks with the empty one, C
without it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from experts.placement.placement import Floats, Ints

MOST_RANKS = 8
PROPOSALS, MOST_PROPOSALS = 200, 8_000
"""For each slot, and of a walk."""
GIFTS = 0.4
"""Share of the proposals that give a copy's slot to another expert; the others exchange two."""
HOT, COLD = 1e-2, 3e-4
"""How much worse, as a share of the mean load, a change may be that is still likely to be made."""

Change = tuple[tuple[int, int, int], ...]
"""Slots that change: rank, slot of the rank, expert that comes in."""


def heaviest_by_cuts(costs_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S,)``: the heaviest rank's load in each step, shared out as evenly as copies allow."""
    return np.asarray((costs_SE @ _parts(copies_ER.shape[1])[_sets(copies_ER)]).max(1))


def anneal(copies_ER: Ints, costs_SE: Floats, price_E: Floats) -> Ints:
    """The best placement found on a walk that begins here; the same for the same arguments.

    Args:
        copies_ER: at most one of an expert on a rank.
        costs_SE: what each expert costs in each step.
        price_E: of each copy that a rank does not hold at the beginning.
    """
    walk = _Walk(copies_ER, costs_SE, price_E)
    best, found_ER = walk.value, copies_ER
    rng = np.random.default_rng(0)
    proposals = min(PROPOSALS * int(copies_ER.sum()), MOST_PROPOSALS)
    for heat in np.geomspace(HOT, COLD, proposals) * walk.level:
        change = walk.proposal(rng)
        made = change and walk.make(change, worse=-heat * np.log(1.0 - rng.random()))
        if made and walk.value < best:
            best, found_ER = walk.value, walk.copies_ER
    return found_ER


class _Walk:
    """Where a walk is.

    Attributes:
        level: mean load of a rank.
        value: mean over the steps of the heaviest load, and the price of what has moved.
    """

    def __init__(self, copies_ER: Ints, costs_SE: Floats, price_E: Floats) -> None:
        self._costs_SE, self._price_E, self._home_E = costs_SE, price_E, _sets(copies_ER)
        self._parts_MC = _parts(copies_ER.shape[1])
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

    def proposal(self, rng: np.random.Generator) -> Change:
        """Nothing where what was drawn is none."""
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

    def make(self, change: Change, worse: float) -> bool:
        """Whether the change was made: it is unless the value grows by more than `worse`."""
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


def _sets(copies_ER: Ints) -> Ints:
    """``(E,)``: the ranks of each expert as bits."""
    return np.asarray((copies_ER > 0) @ (1 << np.arange(copies_ER.shape[1])), np.int64)


@cache
def _parts(ranks: int) -> Floats:
    """``(M, C)``: of an expert on these ranks, what each rank of a set must bear on average."""
    sets_M = np.arange(1 << ranks)
    size_M = (sets_M[:, None] >> np.arange(ranks) & 1).sum(1)
    within_MC = sets_M[:, None] & ~sets_M[None, 1:] == 0
    return np.asarray(within_MC / size_M[1:])
