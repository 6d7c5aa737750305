"""Placements by our own packing: `first_placement`, `repack` while serving, `without_ranks`.

EPLB places by the mean load and gives each copy of an expert an equal part. Here loads differ from
step to step, and copies share an expert's tokens as `routing.balance` does. A placement is judged
by the mean over observed steps of the heaviest rank's load (`heaviest`). From a greedy start (no
rank gets two copies of one expert), the search exchanges experts between two ranks and gives slots
of copies to other experts: by annealing on few ranks, on more as long as the mean falls. `repack`
starts from the present placement and accepts a change only if it also pays for the moves, on steps
that it was not made from: any change can be fitted to chance.

Legend: S steps, E experts, R ranks, P slots, N slots of a rank, M sets of ranks with the empty one,
C without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from experts.placement.placement import (
    Floats,
    Ints,
    Placement,
    PlacementError,
    check_shape,
    eplb,
    fewest_moves,
    linear,
    replicate,
)

KINDS = ("packed", "eplb", "linear")
STEPS = 64
"""Random steps that a placement is made for if none has been observed."""

MAX_STEPS = 64
"""Steps that a placement is judged by, evenly spaced over those observed."""
SWEEPS = 20
MAX_ROUNDS = 200
TRIALS = 24
"""Most promising changes of each kind that are judged exactly before the search ends."""
WORTH = 2e-4
"""Least share by which a change must lower the mean of the heaviest load."""
SURE = 1.0
"""Standard errors by which a certain gain is above 0. A change need not be certain, else shifting
loads are followed too late; but while no gain is certain, `Rebalancer` asks rarely."""
MAX_SWEEPS = 200
LEVEL = 1e-3
"""Loads are level when a sweep moves no more than this share of the mean load on any rank."""
MOST_RANKS = 8
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


def slots_for(num_experts: int, ranks: int, replicas: float) -> int:
    """Slots of all ranks: a share of further copies, rounded up to equally many on each rank."""
    rows = -(-round(num_experts * (1.0 + replicas), 6) // ranks)
    return int(min(rows, num_experts)) * ranks


def first_placement(
    kind: str, num_experts: int, ranks: int, replicas: float, seen_SE: Floats | None = None
) -> Placement:
    """The placement of one layer before the first step; the same on every rank.

    Args:
        kind: one of `KINDS`.
        replicas: share of further copies.
        seen_SE: tokens of each expert in steps of a calibration; None: there is none, and all
            experts are expected to get the same.

    Raises:
        PlacementError: an unknown kind, or EPLB with slots that it cannot deal.
    """
    slots = slots_for(num_experts, ranks, replicas)
    if kind == "packed":
        if seen_SE is None:
            return _for_unseen(num_experts, slots, ranks)
        return pack(seen_SE, slots, ranks)
    if kind == "eplb":
        return eplb(np.ones(num_experts) if seen_SE is None else seen_SE.mean(0), slots, ranks)
    if kind == "linear":
        return linear(num_experts, slots, ranks)
    raise PlacementError(f"no placement is called {kind!r}; there are {', '.join(KINDS)}")


@cache
def _for_unseen(num_experts: int, slots: int, ranks: int) -> Placement:
    """For steps of which only the mean is known: loads are taken to be exponential, which has the
    largest entropy. So copies are spread to help whichever rank has more than others in a
    step. This takes a second on few ranks; on many it finds no better ones than equal loads."""
    if ranks > MOST_RANKS:
        return pack(np.ones((1, num_experts)), slots, ranks)
    return pack(np.random.default_rng(0).exponential(size=(STEPS, num_experts)), slots, ranks)


class Repacked(NamedTuple):
    """The result of `repack`.

    Attributes:
        placement: the new one, or the current one if no change pays.
        sure: it is a new one and its gain is beyond chance (`SURE`).
    """

    placement: Placement
    sure: bool


def pack(costs_SE: Floats, slots: int, ranks: int) -> Placement:
    """Place the experts of one layer for steps like these, from nothing.

    Args:
        costs_SE: what each expert costs in each observed step; see `step_costs`.
        slots: of all ranks.

    Raises:
        PlacementError: the slots cannot be dealt so.
    """
    check_shape(costs_SE.shape[1], slots, ranks)
    costs_SE = _judged(costs_SE)
    mean_E = costs_SE.mean(0)
    starts = [_greedy(mean_E, slots, ranks), eplb(mean_E, slots, ranks).copies_ER]
    free_E = np.zeros_like(mean_E)
    found = [_improve(start, costs_SE, free_E) for start in starts if start.max() == 1]
    return Placement.from_held(min(found, key=lambda one: heaviest(costs_SE, one)) > 0)


def repack(costs_SE: Floats, current: Placement, price_E: Floats) -> Repacked:
    """Change a placement where that pays for steps like these.

    Args:
        costs_SE: expected cost of each expert in some coming steps; fewer than four prove nothing.
        current: the placement; kept if a rank holds two copies of one expert.
        price_E: cost of moving an expert to a rank that lacks it, over the steps in which that must
            pay: a load a step.
    """
    home_ER, costs_SE = current.copies_ER, _judged(costs_SE)
    kept = Repacked(current, sure=False)
    if home_ER.max() > 1 or len(costs_SE) < 4:
        return kept
    by_half_ER, other_SE = _improve(home_ER, costs_SE[::2], price_E), costs_SE[1::2]
    saved_S = _heaviest_S(other_SE, home_ER) - _heaviest_S(other_SE, by_half_ER)
    gain = float(saved_S.mean()) - fee(by_half_ER, home_ER, price_E)
    if gain <= 0:
        return kept
    copies_ER = _improve(home_ER, costs_SE, price_E)
    new = fewest_moves(current, Placement.from_held(copies_ER > 0), price_E)
    doubt = SURE * float(saved_S.std(ddof=1)) / len(saved_S) ** 0.5
    return Repacked(new, new != current and gain > doubt)


def without_ranks(current: Placement, lost: Collection[int], slots: int) -> Placement:
    """The placement of the ranks that are left, in their order; each keeps the experts it holds.

    Experts that no rank holds any more go to ranks with free slots, or else replace copies. The
    remaining slots get copies of the experts with fewest.

    Args:
        lost: ranks that are gone.
        slots: of the remaining ranks together.

    Raises:
        PlacementError: no rank is left, or the slots cannot be dealt so.
    """
    left = [rank for rank in range(current.ranks) if rank not in lost]
    check_shape(current.num_experts, slots, len(left))
    held_ER = current.copies_ER[:, left] > 0
    rows = slots // len(left)
    if (held_ER.sum(0) > rows).any():
        raise PlacementError(f"{slots} slots on {len(left)} ranks are fewer than these hold now")
    for expert in np.flatnonzero(~held_ER.any(1)):
        rank = int(held_ER.sum(0).argmin())
        if held_ER[:, rank].sum() == rows:
            copies_E = held_ER.sum(1)
            copied = int(copies_E.argmax())
            rank = int(held_ER[copied].argmax())
            held_ER[copied, rank] = False
        held_ER[expert, rank] = True
    while (held_ER.sum(0) < rows).any():
        rank = int(held_ER.sum(0).argmin())
        copies_E = np.where(held_ER[:, rank], len(left), held_ER.sum(1))
        held_ER[copies_E.argmin(), rank] = True
    return Placement.from_held(held_ER)


# How even a placement is
#
# On any number of ranks, `share_by_price` levels the loads: a rank's price is its load, and half
# the sum of squared loads has just these dual prices. Its minimum also has the least heaviest load
# (it is the least majorised solution).
#
# On few ranks, `heaviest_by_cuts` needs no levelling. Ranks that alone hold some experts serve all
# tokens of these, so the heaviest rank of a set is at least as heavy as their load over the number
# of ranks. The largest of these bounds over all ``2^R - 1`` sets is reached (maximum flow, minimum
# cut). An exchange of two slots changes two experts' parts of each set.


def heaviest(costs_SE: Floats, copies_ER: Ints) -> float:
    """Mean over the steps of the heaviest rank's load, copies sharing as evenly as they can."""
    return float(_heaviest_S(costs_SE, copies_ER).mean())


def _heaviest_S(costs_SE: Floats, copies_ER: Ints) -> Floats:
    if copies_ER.shape[1] <= MOST_RANKS:
        return heaviest_by_cuts(costs_SE, copies_ER)
    return np.asarray(share_by_price(costs_SE, copies_ER, SWEEPS).sum(1).max(1))


def fee(copies_ER: Ints, home_ER: Ints, price_E: Floats) -> float:
    """Price of the copies that ranks do not hold yet (`home_ER`)."""
    return float(price_E @ ((copies_ER > 0) & (home_ER == 0)).sum(1))


def heaviest_by_cuts(costs_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S,)``: the heaviest rank's load in each step, shared as evenly as copies allow."""
    return np.asarray((costs_SE @ _parts(copies_ER.shape[1])[_sets(copies_ER)]).max(1))


def _sets(copies_ER: Ints) -> Ints:
    """``(E,)``: the ranks of each expert as a bit mask."""
    return np.asarray((copies_ER > 0) @ (1 << np.arange(copies_ER.shape[1])), np.int64)


@cache
def _parts(ranks: int) -> Floats:
    """``(M, C)``: part of an expert on ranks M that each rank of set C bears on average."""
    sets_M = np.arange(1 << ranks)
    size_M = (sets_M[:, None] >> np.arange(ranks) & 1).sum(1)
    within_MC = sets_M[:, None] & ~sets_M[None, 1:] == 0
    return np.asarray(within_MC / size_M[1:])


def share_evenly(loads_SE: Floats, copies_ER: Ints) -> Floats:
    """``(S, E, R)``: each copy of an expert gets the same part, as by taking turns."""
    return np.asarray(loads_SE[:, :, None] * (copies_ER / copies_ER.sum(1, keepdims=True)))


def share_by_price(loads_SE: Floats, copies_ER: Ints, max_sweeps: int = MAX_SWEEPS) -> Floats:
    """``(S, E, R)`` parts of each expert's load in each step that make the heaviest rank lightest.

    Every expert in turn moves its load to the ranks with the lowest price until prices are level.

    Args:
        loads_SE: tokens, or what they cost.
        copies_ER: copies of each expert on each rank; at least one of each expert.
        max_sweeps: turns of every expert; fewer are less exact.
    """
    shares_SER = share_evenly(loads_SE, (copies_ER > 0).astype(np.int64))
    movable = np.flatnonzero((copies_ER > 0).sum(1) > 1)
    movable = movable[np.argsort(-loads_SE[:, movable].sum(0), kind="stable")]
    prices_SR = shares_SER.sum(1)
    enough_S = LEVEL * loads_SE.sum(1) / copies_ER.shape[1]
    for _ in range(max_sweeps if len(movable) else 0):
        before_SR = prices_SR.copy()
        for expert in movable:
            ranks = np.flatnonzero(copies_ER[expert])
            others = prices_SR[:, ranks] - shares_SER[:, expert, ranks]
            parts = _fill(others, loads_SE[:, expert])
            shares_SER[:, expert, ranks] = parts
            prices_SR[:, ranks] = others + parts
        if (np.abs(prices_SR - before_SR).max(1) <= enough_S).all():
            break
    return shares_SER


def _fill(prices_SN: Floats, amounts_S: Floats) -> Floats:
    """Distribute amounts over N ranks with these loads by water-filling: ``(S, N)``."""
    ordered = np.sort(prices_SN, axis=1)
    levels = (amounts_S[:, None] + ordered.cumsum(1)) / np.arange(1, ordered.shape[1] + 1)
    wet = (levels > ordered).sum(1).clip(1) - 1
    level_S = np.take_along_axis(levels, wet[:, None], 1)
    return np.asarray((level_S - prices_SN).clip(0.0))


# The search


def _judged(costs_SE: Floats) -> Floats:
    steps = np.unique(np.linspace(0, len(costs_SE) - 1, MAX_STEPS).astype(np.int64))
    return costs_SE[steps]


def _greedy(loads_E: Floats, slots: int, ranks: int) -> Ints:
    """``(E, R)`` copies: the heaviest copy first, to the lightest rank with room and without it."""
    expert_P, count_E = replicate(loads_E, slots, ranks)
    part_E = loads_E / count_E
    copies_ER = np.zeros((len(loads_E), ranks), np.int64)
    load_R = np.zeros(ranks)
    for expert in expert_P[np.argsort(-part_E[expert_P], kind="stable")]:
        open_R = copies_ER.sum(0) < slots // ranks
        free_R = open_R & (copies_ER[expert] == 0)
        moved = expert
        if free_R.any():
            rank = int(np.where(free_R, load_R, np.inf).argmin())
        else:  # every open rank has it: a full one hands over an expert that the open one lacks
            rank = int(open_R.argmax())
            full = int(np.flatnonzero(copies_ER[expert] == 0)[0])
            moved = int(np.flatnonzero((copies_ER[:, full] > 0) & (copies_ER[:, rank] == 0))[0])
            copies_ER[moved, full] -= 1
            copies_ER[expert, full] += 1
            load_R[full] += part_E[expert] - part_E[moved]
        copies_ER[moved, rank] += 1
        load_R[rank] += part_E[moved]
    return copies_ER


def _improve(home_ER: Ints, costs_SE: Floats, price_E: Floats) -> Ints:
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
