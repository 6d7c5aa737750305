"""Which rank serves which (token, expert) slot of a layer.

Every rank computes the same assignment from the routing of all ranks, so both ends of an all-to-all
know every size and every row's place without another message. `kernels/cpu/assign.cpp` does this in
a seventh of the time; the functions here give the same integers on a machine without a compiler.

Rows are sent in two ways. In "exact" mode a result has a row per slot (`PerSlotRows`); in "summed"
mode, and for hidden states in both, a token has one row per rank that serves it (`PerRankRows`).
Lists of rows are ordered by the rank they go to or come from, this rank last, then by token.

Legend: R ranks, T tokens of this rank, K slots (top-k), N rows that this rank serves, E experts, S
shared experts (held by several ranks), A slots that this rank serves.
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
from kernels.cpu.all_to_all import Assigned, bad_id
from routing.balance import deal, share

Ids = NDArray[np.int16]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PerRankRows:
    """Rows of tokens, one for each rank that serves some of the token's experts.

    Attributes:
        leaving: this rank's tokens that go to other ranks, by rank.
        served_N: the tokens, numbered over all ranks, that this rank serves.
        experts_NK: their experts; -1 for slots that other ranks serve.
        send_R, receive_R: rows to and from each rank; those of this rank are equal.
        position_TR: where the rows of its tokens are among those sent; -1: not sent there.
    """

    leaving: Ints
    served_N: Ints
    experts_NK: Ints
    send_R: list[int]
    receive_R: list[int]
    position_TR: NDArray[np.int32]


@dataclass(frozen=True)
class PerSlotRows:
    """Results with a row for each slot.

    Attributes:
        token_A: the token, numbered over all ranks, of each slot that this rank serves; by token
            and expert.
        experts_A: its expert.
        served_R: how many of them are of each rank's tokens.
        returned_R: slots of this rank's own tokens by the rank that serves them.
        position_TK: where their results are among those returned; negative: unused.
    """

    token_A: Ints
    experts_A: Ints
    served_R: list[int]
    returned_R: list[int]
    position_TK: NDArray[np.int32]


class Assignment:
    """The rows that one rank sends, serves and gets back.

    Args:
        tables: expert ids ``(tokens, slots)`` of each rank; -1 for unused slots.
        rank: this rank.
        placement: which ranks hold which experts.

    Attributes:
        rank, ranks: this rank, and how many there are.
        loads_E: tokens of all ranks together that visit each expert.
        first: number of this rank's first token among those of all ranks.
        tokens: of this rank.
        pairs: distinct (token of this rank, other rank that serves it).
        served: slots that this rank serves.

    Raises:
        IndexError: an id outside [-1, E).
    """

    def __init__(self, tables: Sequence[Ids], rank: int, placement: Placement) -> None:
        self.rank, self.ranks = rank, len(tables)
        self._starts = [0, *accumulate(map(len, tables))]
        self.first, last = self._starts[rank : rank + 2]
        self.tokens = last - self.first
        native, _ = choose_kernel()
        if native is None:
            found = assign(tables, rank, placement)
        else:
            found = native.assign(tables, rank, placement.holders, placement.num_experts)
        self.loads_E, self._ids, self._serving, self.pairs = *found[:3], found.pairs
        self._mine = self._serving[self.first : last]
        self.per_slot = PerSlotRows(*found[3:8])
        self.served = len(self.per_slot.token_A)

    @cached_property
    def per_rank(self) -> PerRankRows:
        here_TK = self._serving == self.rank
        served, receive_R = _own_last(np.flatnonzero(here_TK.any(1)), self._starts, self.rank)
        ranks = [*(r for r in range(self.ranks) if r != self.rank), self.rank]
        goes_RT = np.stack([(self._mine == rank).any(1) for rank in ranks])
        place, tokens = goes_RT.nonzero()
        position_TR = np.full((len(self._mine), self.ranks), -1, np.int32)
        position_TR[tokens, place] = np.arange(len(tokens))
        send_R = dict(zip(ranks, goes_RT.sum(1).tolist(), strict=True))
        return PerRankRows(
            leaving=tokens[: self.pairs],
            served_N=served,
            experts_NK=np.where(here_TK[served], self._ids[served], -1),
            send_R=[send_R[rank] for rank in range(self.ranks)],
            receive_R=receive_R,
            position_TR=position_TR,
        )

    @property
    def place_T(self) -> Ints:
        """Row of each token of all ranks in the received rows with this rank's own behind them."""
        rows, own = self.per_rank, self.tokens
        received = rows.served_N[: len(rows.served_N) - rows.receive_R[self.rank]]
        place_T = np.empty(len(self._ids), np.int64)
        place_T[received] = np.arange(len(received))
        place_T[self.first : self.first + own] = np.arange(len(received), len(received) + own)
        return place_T


def assign(tables: Sequence[Ids], rank: int, placement: Placement) -> Assigned:
    """`NativeAssign` in numpy: the same integers, for machines without a compiler."""
    ids_TK, ranks = _concatenate(tables), len(tables)
    starts = [0, *accumulate(map(len, tables))]
    source_T = np.arange(ranks).repeat([len(table) for table in tables])
    loads_E = np.bincount(ids_TK.reshape(-1) + 1, minlength=placement.num_experts + 1)[1:]
    if len(loads_E) > placement.num_experts:
        raise bad_id(placement.num_experts)
    serving_TK = serving_ranks(ids_TK, loads_E, source_T, placement)

    slots = ids_TK.shape[1]
    here = np.flatnonzero(serving_TK == rank)
    served, served_R = _own_last(here, [start * slots for start in starts], rank)
    mine_TK = serving_TK[starts[rank] : starts[rank + 1]]
    owner = mine_TK.reshape(-1)
    counts = np.bincount(owner + 1, minlength=ranks + 1).tolist()
    order = np.where(owner == rank, ranks, owner).argsort(kind="stable")
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(-counts[0], len(order) - counts[0])
    visited = ((mine_TK == other).any(1) for other in range(ranks) if other != rank)
    return Assigned(
        loads_E=loads_E,
        ids_TK=ids_TK,
        serving_TK=serving_TK,
        token_A=served // slots,
        experts_A=ids_TK.reshape(-1)[served],
        served_R=served_R,
        returned_R=counts[1:],
        position_TK=position.reshape(mine_TK.shape),
        pairs=sum(int(np.count_nonzero(tokens)) for tokens in visited),
    )


def serving_ranks(experts_TK: Ints, loads_E: Ints, source_T: Ints, placement: Placement) -> Ints:
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


def _concatenate(tables: Sequence[Ids]) -> Ints:
    """``(T, K)`` ids of all ranks; tokens with fewer slots get unused ones."""
    slots = max(table.shape[1] for table in tables)
    wide = [
        np.pad(table, ((0, 0), (0, slots - table.shape[1])), constant_values=-1) for table in tables
    ]
    return np.concatenate(wide).astype(np.int64)


def _own_last(places: Ints, starts: Sequence[int], rank: int) -> tuple[Ints, list[int]]:
    """Ascending places with those of this rank last, and how many each rank has.

    Args:
        starts: first place of each rank, and the end.
    """
    ends = places.searchsorted(starts).tolist()
    start, end = ends[rank : rank + 2]
    ordered = np.concatenate([places[:start], places[end:], places[start:end]])
    return ordered, [after - before for before, after in pairwise(ends)]
