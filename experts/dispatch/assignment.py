"""Who serves what in a layer, worked out by every rank alike from the routing of all ranks.

A row goes once to each rank that serves one of its token's experts; rows of the own rank stay.
Lists of rows are in the order of the ranks they go to or come from, the own rank last, and within a
rank in the order of tokens, so both ends agree without a word. `kernels/cpu/assign.cpp` does the
same in a seventh of the time; what a way of travelling does not need is not worked out.

Legend: R ranks, T tokens of this rank, K slots, N rows that this rank serves, E experts, A slots
that it serves, B slots of its own tokens in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from experts.placement import Placement
from kernels.cpu import choose_kernel
from routing.balance import deal, share

Ids = NDArray[np.int16]
Ints = NDArray[np.int64]


def joined(tables: Sequence[Ids]) -> Ints:
    """``(T, K)``: ids of all ranks, with unused slots for tokens that have fewer."""
    slots = max(table.shape[1] for table in tables)
    wide = [
        np.pad(table, ((0, 0), (0, slots - table.shape[1])), constant_values=-1) for table in tables
    ]
    return np.concatenate(wide).astype(np.int64)


def serve(experts_TK: Ints, loads_E: Ints, source_T: Ints, placement: Placement) -> Ints:
    """``(T, K)``: the rank that serves each slot of the tokens of all ranks; -1 for unused ones.

    Args:
        loads_E: tokens of each expert.
        source_T: the rank that each token is on, ascending.
    """
    home_E, shared, alone_RE = placement.home_E, placement.shared, placement.alone_RE
    if not shared:
        return np.asarray(home_E[experts_TK])
    tokens_S = loads_E[placement.shared_S].tolist()
    loads, reads = (alone_RE @ loads_E).tolist(), (alone_RE @ (loads_E > 0)).tolist()
    parts = share(shared.values(), tokens_S, loads, reads)
    homes_S = [max(part, key=part.__getitem__) for part in parts]
    home_E = home_E.copy()
    home_E[placement.shared_S] = homes_S
    serving_TK: Ints = home_E[experts_TK]
    for expert, part, home, tokens in zip(shared, parts, homes_S, tokens_S, strict=True):
        if part[home] < tokens:
            token, slot = (experts_TK == expert).nonzero()
            serving_TK[token, slot] = deal(part, source_T[token])
    return serving_TK


@dataclass(frozen=True)
class Slots:
    """Results with a row for each slot.

    Attributes:
        token_A: the token, of all ranks', of each slot that this rank serves; by token and expert.
        experts_A: its expert.
        served_R: how many of them are of each rank's tokens.
        returned_R: slots of its own tokens by the rank that serves them.
        position_TK: where their results are among the B returned; negative: unused.
    """

    token_A: Ints
    experts_A: Ints
    served_R: list[int]
    returned_R: list[int]
    position_TK: NDArray[np.int32]


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, one for each rank that they go to.

    Attributes:
        leaving: its own tokens that go to other ranks, by rank.
        served_N: the tokens, of all ranks', that this rank serves.
        experts_NK: their experts, -1 for slots that others serve.
        send_R, receive_R: rows to and from each rank; those of the own rank are equal.
        position_TR: where the rows of its tokens are among those sent; -1: not sent there.
    """

    leaving: Ints
    served_N: Ints
    experts_NK: Ints
    send_R: list[int]
    receive_R: list[int]
    position_TR: NDArray[np.int32]


class Assignment:
    """What one rank sends, serves and gets back.

    Args:
        tables: expert ids ``(tokens, slots)`` of each rank; -1 for unused slots.
        rank: whose part.
        placement: who may serve what.

    Attributes:
        rank, ranks: whose part, and of how many.
        loads_E: tokens of all ranks together that visit each expert.
        first: of this rank's tokens among those of all ranks.
        tokens: of this rank.
        pairs: distinct (token of this rank, other rank that serves it).
        served: slots that this rank serves.
    """

    def __init__(self, tables: Sequence[Ids], rank: int, placement: Placement) -> None:
        self.rank, self.ranks = rank, len(tables)
        self._starts = [0, *accumulate(map(len, tables))]
        self.first, last = self._starts[rank : rank + 2]
        self.tokens = last - self.first
        if (native := choose_kernel()[0]) is not None:
            found = native.assign(tables, rank, placement.holders, placement.num_experts)
            self.loads_E, self._ids, self._serving, self.pairs = *found[:3], found.pairs
            self._mine, self.slots = self._serving[self.first : last], Slots(*found[3:8])
            self.served = len(self.slots.token_A)
            return
        self._ids = joined(tables)
        source_T = np.arange(self.ranks).repeat([len(table) for table in tables])
        counts = np.bincount(self._ids.reshape(-1) + 1, minlength=placement.num_experts + 1)
        self.loads_E = counts[1:]
        self._serving = serve(self._ids, self.loads_E, source_T, placement)
        self._mine = self._serving[self.first : last]
        others = (self._mine == other for other in range(self.ranks) if other != rank)
        self.pairs = sum(int(np.count_nonzero(served.any(1))) for served in others)
        self.served = int(np.count_nonzero(self._serving == rank))

    @cached_property
    def slots(self) -> Slots:
        slots = self._ids.shape[1]
        served, served_R = self._own_last(np.flatnonzero(self._serving == self.rank), slots)
        owner = self._mine.reshape(-1)
        counts = np.bincount(owner + 1, minlength=self.ranks + 1).tolist()
        order = np.where(owner == self.rank, self.ranks, owner).argsort(kind="stable")
        position = np.empty(len(order), np.int32)
        position[order] = np.arange(-counts[0], len(order) - counts[0])
        return Slots(
            token_A=served // slots,
            experts_A=self._ids.reshape(-1)[served],
            served_R=served_R,
            returned_R=counts[1:],
            position_TK=position.reshape(self._mine.shape),
        )

    @cached_property
    def rows(self) -> Rows:
        here_TK = self._serving == self.rank
        served, receive_R = self._own_last(np.flatnonzero(here_TK.any(1)), 1)
        ranks = [*(r for r in range(self.ranks) if r != self.rank), self.rank]
        goes_RT = np.stack([(self._mine == rank).any(1) for rank in ranks])
        place, tokens = goes_RT.nonzero()
        position_TR = np.full((len(self._mine), self.ranks), -1, np.int32)
        position_TR[tokens, place] = np.arange(len(tokens))
        send_R = dict(zip(ranks, goes_RT.sum(1).tolist(), strict=True))
        return Rows(
            leaving=tokens[: self.pairs],
            served_N=served,
            experts_NK=np.where(here_TK[served], self._ids[served], -1),
            send_R=[send_R[rank] for rank in range(self.ranks)],
            receive_R=receive_R,
            position_TR=position_TR,
        )

    @property
    def place_T(self) -> Ints:
        """Where rows of all ranks' tokens are among those that come from others and, after them,
        this rank's own."""
        rows, own = self.rows, self.tokens
        received = rows.served_N[: len(rows.served_N) - rows.receive_R[self.rank]]
        place_T = np.empty(len(self._ids), np.int64)
        place_T[received] = np.arange(len(received))
        place_T[self.first : self.first + own] = np.arange(len(received), len(received) + own)
        return place_T

    def _own_last(self, places: Ints, width: int) -> tuple[Ints, list[int]]:
        """Ascending places, of which each token has so many, with those of this rank's tokens
        last; and how many are of each rank's."""
        ends = places.searchsorted([start * width for start in self._starts]).tolist()
        start, end = ends[self.rank : self.rank + 2]
        ordered = np.concatenate([places[:start], places[end:], places[start:end]])
        return ordered, [after - before for before, after in pairwise(ends)]
