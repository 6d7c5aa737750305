"""Which rank serves which (token, expert) slot of a layer.

Every rank computes the same assignment from the routing of all ranks, so both ends of an all-to-all
know every size and every row's place without another message. `kernels/cpu/assign.cpp` chooses the
ranks: copies of an expert hold the same weights, so tokens move from heavy ranks to light ones
along chains of experts that have copies on both, until no choice makes the heaviest rank lighter.

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
from kernels.cpu.all_to_all import Assigned
from kernels.cpu.compiler import BuildError

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
        BuildError: there are no compiled kernels.
    """

    def __init__(self, tables: Sequence[Ids], rank: int, placement: Placement) -> None:
        self.rank, self.ranks = rank, len(tables)
        self._starts = [0, *accumulate(map(len, tables))]
        self.first, last = self._starts[rank : rank + 2]
        self.tokens = last - self.first
        found = _assigned(tables, rank, placement)
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


def serving_ranks(experts_TK: Ints, source_T: Ints, placement: Placement) -> Ints:
    """Return ``(T, K)`` ranks that serve the slots of all ranks' tokens; -1 for unused ones.

    Args:
        source_T: the rank that each token is on, ascending.
    """
    bounds = source_T.searchsorted(range(1, placement.ranks))
    tables = np.split(experts_TK.astype(np.int16), bounds)
    return _assigned(tables, 0, placement).serving_TK


def _assigned(tables: Sequence[Ids], rank: int, placement: Placement) -> Assigned:
    kernel, why = choose_kernel()
    if kernel is None:
        raise BuildError(f"several ranks need the compiled CPU kernels: {why}")
    return kernel.assign(tables, rank, placement.holders, placement.num_experts)


def _own_last(places: Ints, starts: Sequence[int], rank: int) -> tuple[Ints, list[int]]:
    """Ascending places with those of this rank last, and how many each rank has.

    Args:
        starts: first place of each rank, and the end.
    """
    ends = places.searchsorted(starts).tolist()
    start, end = ends[rank : rank + 2]
    ordered = np.concatenate([places[:start], places[end:], places[start:end]])
    return ordered, [after - before for before, after in pairwise(ends)]
