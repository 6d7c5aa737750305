"""Who serves what in a layer, worked out by every rank alike from the routing of all ranks.

Pure functions on arrays. A row goes once to each rank that serves one of its token's experts; rows
of the own rank stay. Lists of rows are in the order of the ranks they go to or come from, the own
rank last, and within a rank in the order of tokens, so both ends agree without a word.

Legend: R ranks, T tokens of this rank, K slots, N rows that this rank serves, E experts, A slots
that it serves, B slots of its own tokens in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from experts.placement import Placement
from routing.balance import choose_counts, choose_ranks

Ints = NDArray[np.int64]

MOST_EXPERTS = 2**15 - 1
"""Ids travel in 16 bits."""


@dataclass(frozen=True)
class Assignment:
    """What one rank sends, serves and gets back.

    Attributes:
        leaving: its own tokens that go to other ranks, by rank.
        received_N: the rows that come from others, among the tokens of all ranks.
        rows_N: the rows it serves among those that come from others and, after them, its tokens.
        send_R, receive_R: rows to and from each rank; those of the own rank are equal.
        experts_NK: of the rows it serves, -1 for slots that others serve.
        served_A, experts_A: row and expert of each slot it serves; by row, then by expert.
        slots_R: those by rank that they come from.
        returned_R: slots of its own tokens by rank that serves them.
        position_TK: where the results of its slots are among the B returned; -1: unused.
        position_TR: where the rows of its tokens are among those sent; -1: not sent there.
        loads_E: tokens of all ranks together that visit each expert.
    """

    leaving: Ints
    received_N: Ints
    rows_N: Ints
    send_R: list[int]
    receive_R: list[int]
    experts_NK: Ints
    served_A: Ints
    experts_A: Ints
    slots_R: list[int]
    returned_R: list[int]
    position_TK: Ints
    position_TR: Ints
    loads_E: Ints


def fitting(placement: Placement, ranks: int) -> Placement:
    """The placement, or ValueError where it is for other ranks or ids do not fit into 16 bits."""
    if placement.ranks != ranks:
        raise ValueError(f"a placement is for {placement.ranks} ranks; there are {ranks}")
    if placement.num_experts > MOST_EXPERTS:
        raise ValueError(
            f"a layer has {placement.num_experts} experts; dispatch counts to {MOST_EXPERTS}"
        )
    return placement


def assign(experts_R: Sequence[NDArray[np.integer]], rank: int, placement: Placement) -> Assignment:
    """The part of one rank.

    Args:
        experts_R: ``(T_r, K)`` expert ids of each rank's tokens, -1 for unused slots.
        rank: whose part.
        placement: who may serve what.
    """
    ranks, sizes = len(experts_R), [len(ids) for ids in experts_R]
    ids = np.concatenate(experts_R).astype(np.int64)
    source = np.repeat(np.arange(ranks), sizes)
    loads_E = np.bincount(ids.reshape(-1) + 1, minlength=placement.num_experts + 1)[1:]
    serving = serve(ids, loads_E, source, placement)
    mine = serving[source == rank]
    tokens, position_TR, send_R = _sent(mine, rank, ranks)
    position_TK, returned_R = _returned(mine, rank, ranks)
    here = serving == rank
    served = _own_last(np.flatnonzero(here.any(1)), source, rank)
    row, slot = here[served].nonzero()
    come = len(served) - send_R[rank]
    return Assignment(
        leaving=tokens[: len(tokens) - send_R[rank]],
        received_N=served[:come],
        rows_N=np.concatenate([np.arange(come), come + tokens[len(tokens) - send_R[rank] :]]),
        send_R=send_R,
        receive_R=np.bincount(source[served], minlength=ranks).tolist(),
        experts_NK=np.where(here, ids, -1)[served],
        served_A=row,
        experts_A=ids[served[row], slot],
        slots_R=np.bincount(source[served[row]], minlength=ranks).tolist(),
        returned_R=returned_R,
        position_TK=position_TK,
        position_TR=position_TR,
        loads_E=loads_E,
    )


@lru_cache(maxsize=1024)
def _homes(placement: Placement) -> Ints | None:
    """The only rank that may serve each expert, and -1 for no expert; None where some have more."""
    held_ER = placement.copies_ER > 0
    return np.append(held_ER.argmax(1), -1) if (held_ER.sum(1) == 1).all() else None


def serve(experts_TK: Ints, loads_E: Ints, source_T: Ints, placement: Placement) -> Ints:
    """``(T, K)``: the rank that serves each slot of the tokens of all ranks; -1 for unused ones.

    Args:
        source_T: the rank that each token is on, ascending.
    """
    if (home_E := _homes(placement)) is not None:
        return np.asarray(home_E[experts_TK])
    counts_ER = choose_counts(loads_E, placement.copies_ER)
    return choose_ranks(experts_TK, counts_ER, source_T)


def _sent(serving_TK: Ints, rank: int, ranks: int) -> tuple[Ints, Ints, list[int]]:
    """Tokens by the rank they go to, where each of them is in that list, and how many go where."""
    goes_RT = np.zeros((ranks, len(serving_TK)), bool)
    token, slot = (serving_TK >= 0).nonzero()
    goes_RT[serving_TK[token, slot], token] = True
    order = [*(r for r in range(ranks) if r != rank), rank]
    place, tokens = goes_RT[order].nonzero()
    position_TR = np.full(goes_RT.T.shape, -1)
    position_TR[tokens, place] = np.arange(len(tokens))
    return tokens, position_TR, goes_RT.sum(1).tolist()


def _returned(serving_TK: Ints, rank: int, ranks: int) -> tuple[Ints, list[int]]:
    """Where the results of slots come back, and how many from which rank."""
    flat = serving_TK.reshape(-1)
    used = np.flatnonzero(flat >= 0)
    order = _own_last(used[np.argsort(flat[used], kind="stable")], flat, rank)
    position = np.full(flat.shape, -1)
    position[order] = np.arange(len(order))
    return position.reshape(serving_TK.shape), np.bincount(flat[used], minlength=ranks).tolist()


def _own_last(places: Ints, owner: Ints, rank: int) -> Ints:
    own = owner[places] == rank
    return np.concatenate([places[~own], places[own]])
