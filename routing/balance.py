"""Which copy of an expert serves which token, so that this step's real load is level on all ranks.

Copies of an expert hold the same weights, so the choice changes no output. Tokens flow from heavy
ranks to light ones along experts that have copies on both: where no way leads further, the heaviest
rank is as light as any choice can make it (ALGORITHMS.md 10.5; `experts.placement.sharing` is the
same with divisible loads and many steps at once).

Legend: E experts, R ranks, T tokens, K slots of a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def choose_counts(tokens_E: Ints, copies_ER: Ints) -> Ints:
    """``(E, R)``: how many of an expert's tokens each rank takes in this step.

    The heaviest rank is as light as it can be with whole tokens, and few experts are computed on
    more than one rank: each that is costs a second reading of its weights. No numpy in the loops:
    this runs at every layer of every step, on a handful of numbers.

    Args:
        tokens_E: of this step, as routed.
        copies_ER: copies of each expert on each rank.
    """
    held_ER = copies_ER > 0
    single_E = held_ER.sum(1) == 1
    counts_ER = np.where(single_E[:, None], held_ER * tokens_E[:, None], 0).astype(np.int64)
    loads = counts_ER.sum(0).tolist()
    shared = np.flatnonzero(~single_E & (tokens_E > 0))
    shared = shared[np.argsort(-tokens_E[shared], kind="stable")]
    parts = [dict.fromkeys(np.flatnonzero(held_ER[expert]).tolist(), 0) for expert in shared]
    for part, tokens in zip(parts, tokens_E[shared].tolist(), strict=True):
        _pour(part, tokens, loads)
    _level(parts, loads)
    _gather(parts)
    for expert, part in zip(shared.tolist(), parts, strict=True):
        counts_ER[expert, list(part)] = list(part.values())
    return counts_ER


def _pour(part: dict[int, int], tokens: int, loads: list[int]) -> None:
    """Give an expert's tokens to its ranks, the lightest first, so that they end up level."""
    ranks = sorted(part, key=loads.__getitem__)
    filled, under = 1, loads[ranks[0]]
    while filled < len(ranks) and tokens + under > filled * loads[ranks[filled]]:
        under += loads[ranks[filled]]
        filled += 1
    level, over = divmod(tokens + under, filled)
    for place, rank in enumerate(ranks[:filled]):
        part[rank] = level + (place < over) - loads[rank]
        loads[rank] += part[rank]


def _level(parts: list[dict[int, int]], loads: list[int]) -> None:
    """Move tokens along chains of copies until none leads from a heaviest rank to one 2 below."""
    while True:
        heaviest = max(loads)
        for start in [rank for rank, load in enumerate(loads) if load == heaviest]:
            chain = _chain(parts, loads, start)
            if chain:
                break
        else:
            return
        end = chain[-1][2]
        moved = min((loads[start] - loads[end]) // 2, *(parts[e][a] for e, a, _ in chain))
        for expert, source, target in chain:
            parts[expert][source] -= moved
            parts[expert][target] += moved
        loads[start] -= moved
        loads[end] += moved


def _chain(parts: list[dict[int, int]], loads: list[int], start: int) -> list[tuple[int, int, int]]:
    """Shortest ``(expert, from, to)`` moves to a rank at least 2 lighter; empty if there is none.

    No expert moves twice: going on from where its tokens can go needs another's.
    """
    came: dict[int, tuple[int, int, int] | None] = {start: None}
    queue = [start]
    for rank in queue:
        for expert, part in enumerate(parts):
            if not part.get(rank):
                continue
            for target in part:
                if target not in came:
                    came[target] = (expert, rank, target)
                    queue.append(target)
                    if loads[target] <= loads[start] - 2:
                        chain, step = [], came[target]
                        while step:
                            chain.append(step)
                            step = came[step[1]]
                        return chain[::-1]
    return []


def _gather(parts: list[dict[int, int]]) -> None:
    """Split fewer experts at the same loads: two that share a pair of ranks trade tokens."""
    open_by: dict[tuple[int, int], int] = {}
    for expert, part in enumerate(parts):
        for a in part:
            for b in part:
                while a < b and part[a] and part[b]:
                    other = open_by.get((a, b), expert)
                    theirs = parts[other]
                    if other == expert or not (theirs[a] and theirs[b]):
                        open_by[a, b] = expert
                        break
                    # Either way round keeps the loads; the one that moves fewer ends a split.
                    to_a, to_b = min(part[b], theirs[a]), min(part[a], theirs[b])
                    moved = to_a if to_a <= to_b else -to_b
                    part[a] += moved
                    part[b] -= moved
                    theirs[a] -= moved
                    theirs[b] += moved


def choose_ranks(expert_ids_TK: Ints, counts_ER: Ints, source_T: Ints | None = None) -> Ints:
    """``(T, K)``: the rank that serves each slot, -1 for unused ones (expert -1).

    Args:
        counts_ER: of `choose_counts` for these tokens; an expert's first tokens go to its first
            rank, so neighbours stay together.
        source_T: the rank that each token is on, ascending: a rank first takes tokens of its own,
            which need not travel.
    """
    ids = expert_ids_TK.reshape(-1)
    order = np.argsort(ids, kind="stable")
    order = order[np.count_nonzero(ids < 0) :]
    experts, ranks = counts_ER.shape
    chosen = np.full(ids.shape, -1, np.int64)
    if source_T is not None:
        source = source_T[order // expert_ids_TK.shape[1]]
        cells = ids[order] * ranks + source  # ascending: one run for each expert and source
        brought = np.bincount(cells, minlength=experts * ranks)
        starts = brought.cumsum() - brought
        stays = np.arange(len(order)) - starts[cells] < counts_ER.reshape(-1)[cells]
        chosen[order[stays]] = source[stays]
        counts_ER = counts_ER - np.minimum(counts_ER, brought.reshape(experts, ranks))
        order = order[~stays]
    places = np.tile(np.arange(ranks), experts)
    chosen[order] = np.repeat(places, counts_ER.reshape(-1))
    return chosen.reshape(expert_ids_TK.shape)
