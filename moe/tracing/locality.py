"""How many experts neighbouring tokens need, and how long a few of them last.

Legend: N tokens, K slots a token, E experts, R runs of equally many consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

SEED = 0


def law(num_experts: int, top_k: float, tokens: int) -> float:
    """Distinct experts of so many tokens that choose evenly and independently:
    ``E (1 - (1 - K/E)^t)``."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** tokens))


def visits(ids: Ids, lengths: Sequence[int], tokens: int, num_experts: int) -> NDArray[np.int64]:
    """``(R, E)``: visits of each expert by each whole run of consecutive tokens of a sequence.

    Args:
        ids: ``(N, K)``, -1 for none.
        lengths: of the sequences, which add up to N.
        tokens: of a run.
    """
    kept = np.concatenate([np.zeros(0, np.int64), *_whole_runs(lengths, tokens)])
    slots = ids[kept].reshape(-1, tokens * ids.shape[1])
    keys = np.arange(len(slots))[:, None] * (num_experts + 1) + slots + 1
    counts = np.bincount(keys.ravel(), minlength=len(slots) * (num_experts + 1))
    return counts.reshape(len(slots), num_experts + 1)[:, 1:]


def _whole_runs(lengths: Sequence[int], tokens: int) -> Iterator[Ids]:
    start = 0
    for length in lengths:
        yield np.arange(start, start + length // tokens * tokens)
        start += length


def distinct(ids: Ids, lengths: Sequence[int], tokens: int, num_experts: int) -> float:
    """Mean distinct experts of consecutive tokens; nan where no sequence is that long."""
    counts = visits(ids, lengths, tokens, num_experts)
    return float((counts > 0).sum(1).mean()) if len(counts) else float("nan")


def distinct_apart(ids: Ids, tokens: int, num_experts: int) -> float:
    """The same of tokens that have nothing to do with each other, as in a batch."""
    mixed = ids[np.random.default_rng(SEED).permutation(len(ids))]
    return distinct(mixed, [len(ids)], tokens, num_experts)


def cache_best_hits(counts: NDArray[np.int64], slots: int) -> float:
    """Segment cache best hit rate: hits of a cache of so many experts that for each run holds those
    it needs most (SCH, arXiv 2505.16056)."""
    best = np.sort(counts, 1)[:, ::-1][:, :slots]
    return float(best.sum() / counts.sum()) if counts.sum() else float("nan")


def routing_best_score(counts: NDArray[np.int64], tokens: int) -> float:
    """Segment routing best performance: the best F1 of sending all tokens of a run to the same
    experts, whatever their number, mean over runs (SRP, arXiv 2505.16056)."""
    if not len(counts):
        return float("nan")
    hits = np.sort(counts, 1)[:, ::-1].cumsum(1)
    sent = tokens * np.arange(1, counts.shape[1] + 1)
    return float((2 * hits / (sent + counts.sum(1, keepdims=True))).max(1).mean())


def overflow(
    ids: Ids, lengths: Sequence[int], num_experts: int, factor: float, parts: int
) -> Floats:
    """``(parts,)``: share of the visits beyond the experts' capacity, by where in its sequence a
    token stands. An expert's capacity is ``factor`` times an equal share of a sequence's visits;
    who comes first is served first."""
    over, all_visits = np.zeros(parts), np.zeros(parts)
    start = 0
    for length in lengths:
        own = ids[start : start + length]
        start += length
        place = np.repeat(np.arange(length) * parts // length, ids.shape[1])
        used = own.ravel() >= 0
        experts, place = own.ravel()[used], place[used]
        order = np.argsort(experts, kind="stable")
        first = np.searchsorted(experts[order], np.arange(num_experts))
        rank = np.empty(len(experts), np.int64)
        rank[order] = np.arange(len(experts)) - first[experts[order]]
        beyond = rank >= np.ceil(factor * len(experts) / num_experts)
        over += np.bincount(place[beyond], minlength=parts)
        all_visits += np.bincount(place, minlength=parts)
    return over / np.maximum(all_visits, 1)


def together(ids: Ids, num_experts: int) -> Floats:
    """``(E, E)``: how many times as often as by chance two experts serve the same token (lift); nan
    on the diagonal and for experts that serve none."""
    chosen = np.zeros((len(ids), num_experts + 1), np.float32)
    np.put_along_axis(chosen, ids + 1, 1.0, 1)
    both = chosen[:, 1:].T @ chosen[:, 1:]
    alone = np.diag(both).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift: Floats = both * len(ids) / np.outer(alone, alone)
    np.fill_diagonal(lift, np.nan)
    return np.where(np.isfinite(lift), lift, np.nan)
