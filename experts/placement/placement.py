"""`Placement`: which rank holds which experts of a layer, some of them more than once.

Also the two placements that need no search: `linear`, and DeepSeek's `eplb`.

Legend: E experts, R ranks, P slots (experts of all ranks together, copies counted), S steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class PlacementError(ValueError):
    """No placement of this shape exists."""


@dataclass(frozen=True)
class Placement:
    """Experts of one layer on ranks with equally many slots.

    Attributes:
        experts_P: the expert in each slot; the slots of a rank are neighbours.
        num_experts: E; each is in at least one slot.
        ranks: R.
    """

    experts_P: tuple[int, ...]
    num_experts: int
    ranks: int

    def __post_init__(self) -> None:
        check_shape(self.num_experts, len(self.experts_P), self.ranks)
        if set(self.experts_P) != set(range(self.num_experts)):
            raise PlacementError(
                f"every expert from 0 to {self.num_experts - 1} must have a slot and no other may: "
                f"got {self.experts_P}"
            )

    @classmethod
    def from_held(cls, held_ER: NDArray[np.bool_]) -> Placement:
        """The placement of ``(E, R)`` flags: whether a rank holds an expert."""
        return cls(tuple(np.nonzero(held_ER.T)[1].tolist()), *held_ER.shape)

    @cached_property
    def home_E(self) -> Ints:
        """``(E + 1,)``: the first rank that holds each expert, and -1 for no expert (-1)."""
        return np.append((self.copies_ER > 0).argmax(1), -1)

    @cached_property
    def shared(self) -> dict[int, list[int]]:
        """The ranks of each expert that several hold."""
        held_ER = self.copies_ER > 0
        found = np.flatnonzero(held_ER.sum(1) > 1).tolist()
        return {expert: np.flatnonzero(held_ER[expert]).tolist() for expert in found}

    @cached_property
    def shared_S(self) -> Ints:
        """The experts that several ranks hold."""
        return np.array(list(self.shared), np.int64)

    @cached_property
    def holders(self) -> Ints:
        """``(E + 1,)`` bounds of each expert's ranks in what follows: the ranks of all experts."""
        held_ER = self.copies_ER > 0
        return np.concatenate([[0], held_ER.sum(1).cumsum(), np.flatnonzero(held_ER) % self.ranks])

    @cached_property
    def alone_RE(self) -> Ints:
        """``(R, E)``: 1 where a rank is the only one that holds an expert."""
        held_ER = self.copies_ER > 0
        return np.ascontiguousarray((held_ER & (held_ER.sum(1) == 1)[:, None]).T, np.int64)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, slots and ranks."""
        return self.num_experts, len(self.experts_P), self.ranks

    @cached_property
    def copies_ER(self) -> Ints:
        """``(E, R)``: copies of each expert on each rank."""
        copies_ER = np.zeros((self.num_experts, self.ranks), np.int64)
        rank_P = np.arange(len(self.experts_P)) // (len(self.experts_P) // self.ranks)
        np.add.at(copies_ER, (np.array(self.experts_P), rank_P), 1)
        return copies_ER


def check_shape(num_experts: int, slots: int, ranks: int) -> None:
    """Raise `PlacementError` unless these slots can be dealt to the ranks with all experts in."""
    if ranks < 1 or slots % ranks or not num_experts <= slots <= num_experts * ranks:
        raise PlacementError(
            f"{slots} slots for {num_experts} experts on {ranks} ranks: the slots must be a "
            "multiple of the ranks, at least one an expert and at most one an expert and rank"
        )


def linear(num_experts: int, slots: int, ranks: int) -> Placement:
    """Experts in the order of their ids; further slots repeat the first ones."""
    check_shape(num_experts, slots, ranks)
    return Placement(tuple(slot % num_experts for slot in range(slots)), num_experts, ranks)


def step_costs(tokens_SE: Floats, reads_E: Floats) -> Floats:
    """``(S, E)``: the cost of an expert in each step, in tokens: those that visit, and its reading.

    Args:
        tokens_SE: tokens that visit an expert in a step.
        reads_E: tokens that could be served in the time of reading an expert, times the share of
            visits that must read it.
    """
    return tokens_SE + np.minimum(tokens_SE, 1.0) * reads_E


def fewest_moves(current: Placement, new: Placement, price_E: Floats) -> Placement:
    """The new placement with its ranks renumbered so that as little as possible moves; experts that
    stay keep their slots.

    Ranks must be alike (one node, or equal links), as any numbering is taken to be as good.

    Args:
        current, new: of one shape.
        price_E: of bringing each expert to a rank.
    """
    from scipy.optimize import linear_sum_assignment  # optional: for several ranks

    held_ER, wanted_ER = current.copies_ER > 0, new.copies_ER > 0
    kept_RR = (held_ER * price_E[:, None]).T @ wanted_ER
    _, names = linear_sum_assignment(kept_RR, maximize=True)
    before_RN = np.array(current.experts_P).reshape(current.ranks, -1)
    after_RN = np.array(new.experts_P).reshape(new.ranks, -1)[names]
    slots = [_in_place(b, a) for b, a in zip(before_RN.tolist(), after_RN.tolist(), strict=True)]
    return Placement(tuple(chain.from_iterable(slots)), new.num_experts, new.ranks)


def _in_place(before: list[int], after: list[int]) -> list[int]:
    """The experts of `after`; those that are also in `before` keep their places."""
    left = list(after)
    placed: list[int | None] = []
    for expert in before:
        stays = expert in left
        placed.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in placed]


def eplb(loads_E: Floats, slots: int, ranks: int, *, groups: int = 1, nodes: int = 1) -> Placement:
    """The placement of DeepSeek's load balancer (github.com/deepseek-ai/EPLB), number for number.

    Args:
        loads_E: expected load of each expert.
        slots: of all ranks.
        groups: number of groups of experts; a group stays on one node if nodes divide the groups.
        nodes: number of nodes with equally many ranks.

    Raises:
        PlacementError: numbers that do not divide.
    """
    experts = len(loads_E)
    check_shape(experts, slots, ranks)
    if groups % nodes:
        groups = nodes = 1
    if experts % groups or slots % nodes or ranks % nodes:
        raise PlacementError(
            f"{experts} experts in {groups} groups, {slots} slots and {ranks} ranks on {nodes} "
            "nodes do not divide evenly"
        )
    size = experts // groups
    of_node = _packs(loads_E.reshape(groups, size).sum(1), nodes)
    chosen: list[int] = []
    for node_groups in of_node:
        own = (np.array(node_groups)[:, None] * size + np.arange(size)).reshape(-1)
        expert_P, count = replicate(loads_E[own], slots // nodes)
        packs = _packs((loads_E[own] / count)[expert_P], ranks // nodes)
        chosen += [int(own[expert_P[slot]]) for pack in packs for slot in pack]
    return Placement(tuple(chosen), experts, ranks)


def replicate(loads_E: Floats, slots: int, most: int | None = None) -> tuple[Ints, Ints]:
    """The expert of each slot and the copies of each expert: the heaviest copy is halved next.

    Args:
        most: copies of one expert; None for any number.
    """
    count_E = np.ones(len(loads_E), np.int64)
    chosen = list(range(len(loads_E)))
    while len(chosen) < slots:
        open_E = count_E < (most or slots)
        heaviest = int(np.where(open_E, loads_E / count_E, -1.0).argmax())
        chosen.append(heaviest)
        count_E[heaviest] += 1
    return np.array(chosen), count_E


def _packs(loads: Floats, packs: int) -> list[list[int]]:
    """Equally many items in each pack: the heaviest first, to the lightest with room."""
    room = len(loads) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    items: list[list[int]] = [[] for _ in range(packs)]
    weights = [0.0] * packs
    for item in np.argsort(-loads, kind="stable").tolist():
        pack = min((p for p in range(packs) if len(items[p]) < room), key=weights.__getitem__)
        items[pack].append(item)
        weights[pack] += float(loads[item])
    return items
