"""`experts.dispatch.assignment` in numpy: the oracle of kernels/cpu/assign.cpp, to the integer.

Legend: R ranks, T tokens, K slots (top-k), E experts, S shared experts (held by several ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from experts.dispatch.assignment import Ids, Ints
from experts.placement import Placement
from kernels.cpu.all_to_all import Assigned, bad_id
from tests.oracles.balance import deal, share


def assign(tables: Sequence[Ids], rank: int, placement: Placement) -> Assigned:
    """Return what the compiled kernel returns."""
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
