"""The copy of an expert that serves each token, chosen so that this step's loads are level.

Copies of an expert hold the same weights, so the choice changes no output. Tokens move from heavy
ranks to light ones along chains of experts that have copies on both; when no chain is left, the
heaviest rank is as light as any choice can make it. (`experts.placement.packing` does the same with
divisible loads, over many steps.) This is the oracle of kernels/cpu/assign.cpp, which gives the
same integers.

Legend: E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def choose_counts(tokens_E: Ints, copies_ER: Ints) -> Ints:
    """``(E, R)``: how many of an expert's tokens each rank takes in this step.

    Args:
        tokens_E: tokens of this step that are routed to each expert.
        copies_ER: copies of each expert on each rank.
    """
    held_ER = copies_ER > 0
    single_E = held_ER.sum(1) == 1
    counts_ER = np.where(single_E[:, None], held_ER * tokens_E[:, None], 0).astype(np.int64)
    shared = np.flatnonzero(~single_E)
    ranks_of = [np.flatnonzero(held_ER[expert]).tolist() for expert in shared]
    loads, reads = counts_ER.sum(0).tolist(), (counts_ER > 0).sum(0).tolist()
    parts = share(ranks_of, tokens_E[shared].tolist(), loads, reads)
    for expert, part in zip(shared.tolist(), parts, strict=True):
        counts_ER[expert, list(part)] = list(part.values())
    return counts_ER


def share(
    ranks_of: Iterable[Sequence[int]], tokens_of: Sequence[int], loads: list[int], reads: list[int]
) -> list[dict[int, int]]:
    """Divide the tokens of each expert with several copies among its ranks, for this step.

    The heaviest rank is as light as whole tokens allow, and few experts are computed on more than
    one rank, because each further rank reads the weights once more. Where that leaves a choice, all
    ranks read about equally many experts.

    Args:
        ranks_of: the ranks with a copy of each of these experts.
        tokens_of: the tokens routed to each of them.
        loads: tokens of each rank without these experts; updated.
        reads: experts that each rank reads, without these; updated.
    """
    parts = [dict.fromkeys(ranks, 0) for ranks in ranks_of]
    order = sorted(range(len(parts)), key=tokens_of.__getitem__, reverse=True)
    poured = [parts[expert] for expert in order if tokens_of[expert]]
    for part, expert in zip(poured, order, strict=False):
        _pour(part, tokens_of[expert], loads)
    _level(poured, loads)
    _gather(poured)
    for part in poured:
        for rank, taken in part.items():
            reads[rank] += taken > 0
    while _trade(poured, reads):
        pass
    return parts


def deal(part: Mapping[int, int], source_N: Ints) -> Ints:
    """``(N,)``: the rank that serves each token of one expert.

    Args:
        part: tokens that each rank takes, N in all.
        source_N: the rank that each token is on, ascending. A rank first takes its own tokens,
            which need no transfer.
    """
    chosen, left = np.full(len(source_N), -1), {}
    for rank, count in part.items():
        first, last = np.searchsorted(source_N, (rank, rank + 1)).tolist()
        own = min(count, last - first)
        chosen[first : first + own] = rank
        left[rank] = count - own
    chosen[chosen < 0] = np.repeat(list(left), list(left.values()))
    return chosen


def _pour(part: dict[int, int], tokens: int, loads: list[int]) -> None:
    """Give an expert's tokens to its ranks, the lightest first, to level the loads."""
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
    """Move tokens along chains until none leads from a heaviest rank to one at least 2 lighter."""
    while (heaviest := max(loads)) - min(loads) > 1:
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

    No expert occurs twice: its tokens reach all its ranks in one move.
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
    """Split fewer experts at equal loads: two split over the same two ranks trade tokens."""
    open_by: dict[tuple[int, int], int] = {}
    for expert, part in enumerate(parts):
        if sum(map(bool, part.values())) < 2:
            continue
        for a in part:
            for b in part:
                while a < b and part[a] and part[b]:
                    other = open_by.get((a, b), expert)
                    theirs = parts[other]
                    if other == expert or not (theirs[a] and theirs[b]):
                        open_by[a, b] = expert
                        break
                    # Both directions keep the loads; the one that moves fewer tokens ends a split.
                    to_a, to_b = min(part[b], theirs[a]), min(part[a], theirs[b])
                    moved = to_a if to_a <= to_b else -to_b
                    part[a] += moved
                    part[b] -= moved
                    theirs[a] -= moved
                    theirs[b] += moved


def _trade(parts: list[dict[int, int]], reads: list[int]) -> bool:
    """Trade two experts of a rank that reads many for one with as many tokens; False: no trade."""
    ranks = sorted(range(len(reads)), key=reads.__getitem__)
    for a in sorted(ranks, key=lambda rank: (-reads[rank], rank)):
        for b in ranks:
            if reads[a] - reads[b] < 2:
                break
            if _trade_between(parts, a, b):
                reads[a] -= 1
                reads[b] += 1
                return True
    return False


def _trade_between(parts: list[dict[int, int]], a: int, b: int) -> bool:
    shared = [part for part in parts if a in part and b in part]
    theirs: dict[int, dict[int, int]] = {}
    for part in shared:
        if part[b] == sum(part.values()):
            theirs.setdefault(part[b], part)
    ours = [part for part in shared if part[a] == sum(part.values())]
    for one, two in combinations(ours, 2):
        back = theirs.get(one[a] + two[a])
        if back is not None:
            for part in (one, two, back):
                part[a], part[b] = part[b], part[a]
            return True
    return False
