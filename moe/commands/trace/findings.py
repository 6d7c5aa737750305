"""Measure a trace: balance, locality, and how far a token's id determines its experts (OpenMoE).

`analyse` returns everything as one `Findings`; `moe.commands.trace.report` shows it.
Legend: N tokens, K slots a token, E experts, L layers, R runs of equally many consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe.calibration.trace import Trace
from routing.predict.token_table import TokenTable, fit_token_table

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
SEED = 0
_ROWS = 2048
RUNS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens whose experts are counted together."""
SEGMENT = 16
"""Tokens of a segment whose experts a fixed set serves."""
CACHES = (1, 2, 3, 4)
"""Slots of an optimal cache, in multiples of K."""
PAIRS = 3
"""Number of pairs of experts with the highest co-activation that are named."""
CAPACITY = 1.25
PARTS = 10
"""A sequence's tenths, from its beginning to its end."""


@dataclass(frozen=True)
class LayerFindings:
    """The measurements of one MoE layer. Shares are in [0, 1], nan if the trace is too short.

    Attributes:
        num_experts, top_k: E, and mean visits of a token.
        load: visits of each expert.
        max_violation: heaviest load over the mean, minus 1 (MaxVio).
        explained: mutual information of token id and expert over the expert's entropy.
        recall: of tables, by their key (`table_recall`).
        same_token, same_pair, any_tokens: mean share of common experts of two tokens with the same
            id, with the same id and the same token before, and of any two.
        distinct, distinct_apart, law: distinct experts of `RUNS` tokens: consecutive ones, tokens
            from anywhere, and uniformly and independently routed ones.
        cache_hits: hit ratio of an optimal cache of `CACHES` times K experts for each segment.
        segment_score: best F1 of one set of experts for a whole segment.
        overflow: share of visits beyond a capacity of `CAPACITY`, by tenths of a sequence.
        weight_ratio: median of a token's second weight over its first.
        pairs: the pairs of experts with the highest lift, and their lift.
        lift: ``(E, E)`` of all pairs (`coactivation_lift`).
    """

    num_experts: int
    top_k: float
    load: list[int]
    max_violation: float
    explained: float
    recall: dict[str, float]
    same_token: float
    same_pair: float
    any_tokens: float
    distinct: list[float]
    distinct_apart: list[float]
    law: list[float]
    cache_hits: list[float]
    segment_score: float
    overflow: list[float]
    weight_ratio: float
    pairs: list[tuple[int, int, float]]
    lift: Floats = field(compare=False, repr=False)


@dataclass(frozen=True)
class Findings:
    """A model's routing on a text.

    Attributes:
        model, text: names to show.
        num_tokens, num_sequences: size of the text that was read.
        layers: each MoE layer.
    """

    model: str
    text: str
    num_tokens: int
    num_sequences: int
    layers: list[LayerFindings]

    def mean(self, value: Callable[[LayerFindings], float]) -> float:
        """Mean over the layers whose value is known; nan if none is."""
        known = [number for number in map(value, self.layers) if not isnan(number)]
        return float(np.mean(known)) if known else float("nan")

    def as_json(self) -> dict[str, Any]:
        """Plain values, unknown numbers as null; without `lift`, which is too large."""
        about = {"runs": RUNS, "segment": SEGMENT, "caches": CACHES, "capacity": CAPACITY}
        found: dict[str, Any] = about | asdict(self)
        for layer in found["layers"]:
            del layer["lift"]
        plain: dict[str, Any] = _without_nan(found)
        return plain


def analyse(
    trace: Trace,
    vocabulary: int,
    model: str,
    text: str,
    on_layer: Callable[[int], object] = lambda done: None,
) -> Findings:
    """Measure a trace.

    Args:
        trace: at least one token.
        vocabulary: V.
        model, text: names to show.
        on_layer: called with the number of layers done.
    """
    recall = table_recall(trace, vocabulary)
    ratios = weight_ratios(trace.weights)
    contexts = trace.contexts(2).numpy()
    pairs = np.where(contexts[:, 0] < 0, -1, contexts[:, 0] * vocabulary + contexts[:, 1])
    layers = []
    for index, (ids, experts) in enumerate(zip(trace.expert_ids, trace.num_experts, strict=True)):
        layers.append(
            _layer(
                ids.long().numpy(), experts, trace.lengths, contexts[:, 1], pairs,
                {name: values[index] for name, values in recall.items()}, ratios[index],
            )
        )  # fmt: skip
        on_layer(index + 1)
    return Findings(model, text, trace.num_tokens, len(trace.lengths), layers)


def _layer(
    ids: Ids, experts: int, lengths: Sequence[int], words: Ids, pairs: Ids,
    recall: dict[str, float], ratio: float,
) -> LayerFindings:  # fmt: skip
    load: NDArray[np.int64] = np.bincount(ids.ravel() + 1, minlength=experts + 1)[1:]
    top_k = float((ids >= 0).sum() / len(ids))
    segments = visits(ids, lengths, SEGMENT, experts)
    slots = [max(round(times * top_k), 1) for times in CACHES]
    lift = coactivation_lift(ids, experts)
    return LayerFindings(
        num_experts=experts,
        top_k=top_k,
        load=load.tolist(),
        max_violation=float(load.max() / max(load.mean(), 1e-12) - 1),
        explained=explained(words, ids),
        recall=recall,
        same_token=agreement(words, ids),
        same_pair=agreement(pairs, ids),
        any_tokens=chance_agreement(ids),
        distinct=[distinct(ids, lengths, run, experts) for run in RUNS],
        distinct_apart=[distinct_apart(ids, run, experts) for run in RUNS],
        law=[law(experts, top_k, run) for run in RUNS],
        cache_hits=[cache_best_hits(segments, count) for count in slots],
        segment_score=routing_best_score(segments, SEGMENT),
        overflow=overflow(ids, lengths, experts, CAPACITY, PARTS).tolist(),
        weight_ratio=ratio,
        pairs=_most_together(lift),
        lift=lift,
    )


def _most_together(lift: Floats) -> list[tuple[int, int, float]]:
    lift = np.triu(np.nan_to_num(lift), 1)
    best = np.argsort(-lift, axis=None, kind="stable")[:PAIRS]
    rows, columns = np.unravel_index(best, lift.shape)
    found = zip(rows.tolist(), columns.tolist(), lift[rows, columns].tolist(), strict=True)
    return [pair for pair in found if pair[2] > 0]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value


def law(num_experts: int, top_k: float, tokens: int) -> float:
    """Distinct experts of t tokens with uniform, independent routing: ``E (1 - (1 - K/E)^t)``."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** tokens))


def visits(ids: Ids, lengths: Sequence[int], tokens: int, num_experts: int) -> NDArray[np.int64]:
    """``(R, E)``: visits of each expert in each complete run of consecutive tokens of a sequence.

    Args:
        ids: ``(N, K)``, -1 for none.
        lengths: of the sequences; their sum is N.
        tokens: length of a run.
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
    """Mean distinct experts of consecutive tokens; nan if no sequence is that long."""
    counts = visits(ids, lengths, tokens, num_experts)
    return float((counts > 0).sum(1).mean()) if len(counts) else float("nan")


def distinct_apart(ids: Ids, tokens: int, num_experts: int) -> float:
    """Mean distinct experts of unrelated tokens, as in a batch."""
    mixed = ids[np.random.default_rng(SEED).permutation(len(ids))]
    return distinct(mixed, [len(ids)], tokens, num_experts)


def cache_best_hits(counts: NDArray[np.int64], slots: int) -> float:
    """Segment cache best hit rate (SCH, arXiv 2505.16056): hit ratio of a cache that holds the
    ``slots`` most visited experts of each run."""
    best = np.sort(counts, 1)[:, ::-1][:, :slots]
    return float(best.sum() / counts.sum()) if counts.sum() else float("nan")


def routing_best_score(counts: NDArray[np.int64], tokens: int) -> float:
    """Segment routing best performance (SRP, arXiv 2505.16056): the best F1 of sending all
    tokens of a run to one set of experts of any size; mean over runs."""
    if not len(counts):
        return float("nan")
    hits = np.sort(counts, 1)[:, ::-1].cumsum(1)
    sent = tokens * np.arange(1, counts.shape[1] + 1)
    return float((2 * hits / (sent + counts.sum(1, keepdims=True))).max(1).mean())


def overflow(
    ids: Ids, lengths: Sequence[int], num_experts: int, factor: float, parts: int
) -> Floats:
    """``(parts,)``: share of the visits beyond the experts' capacity, by the token's position in
    its sequence. An expert's capacity is ``factor`` times an equal share of its visits, and
    earlier tokens are served first."""
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


def coactivation_lift(ids: Ids, num_experts: int) -> Floats:
    """``(E, E)``: lift, the frequency of two experts serving the same token over that by chance;
    nan on the diagonal and for experts without tokens."""
    chosen = np.zeros((len(ids), num_experts + 1), np.float32)
    np.put_along_axis(chosen, ids + 1, 1.0, 1)
    both = chosen[:, 1:].T @ chosen[:, 1:]
    alone = np.diag(both).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift: Floats = both * len(ids) / np.outer(alone, alone)
    np.fill_diagonal(lift, np.nan)
    return np.where(np.isfinite(lift), lift, np.nan)


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in bits of a distribution given by counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def explained(tokens: Ids, ids: Ids) -> float:
    """Mutual information of token id and expert, as a share of the expert's entropy.

    Rare tokens seem to explain everything, so the mutual information of shuffled tokens is
    subtracted.

    Args:
        tokens: ``(N,)``.
        ids: ``(N, K)``, -1 for none.
    """
    uncertain = entropy(np.unique(ids[ids >= 0], return_counts=True)[1])
    if uncertain == 0:
        return 0.0
    shuffled = np.random.default_rng(SEED).permutation(tokens)
    gain = _shared_bits(tokens, ids) - _shared_bits(shuffled, ids)
    return max(gain, 0.0) / uncertain


def _shared_bits(tokens: Ids, ids: Ids) -> float:
    used = ids >= 0
    words, experts = np.broadcast_to(tokens[:, None], ids.shape)[used], ids[used]
    pairs = words * (int(ids.max()) + 1) + experts
    alone = (entropy(np.unique(each, return_counts=True)[1]) for each in (words, experts))
    return sum(alone) - entropy(np.unique(pairs, return_counts=True)[1])


def agreement(keys: Ids, ids: Ids) -> float:
    """Mean share of common experts of consecutive tokens with the same key; nan if no key occurs
    twice. Negative keys do not count."""
    order = np.argsort(keys, kind="stable")
    same = (keys[order[1:]] == keys[order[:-1]]) & (keys[order[1:]] >= 0)
    return _overlap(ids[order[:-1][same]], ids[order[1:][same]])


def chance_agreement(ids: Ids) -> float:
    """Mean share of common experts of any two tokens."""
    mixed = ids[np.random.default_rng(SEED).permutation(len(ids))]
    return _overlap(mixed[:-1], mixed[1:])


def _overlap(some: Ids, others: Ids) -> float:
    common = (some[:, :, None] == others[:, None, :]) & (some >= 0)[:, :, None]
    total = (some >= 0).sum()
    return float(common.sum() / total) if total else float("nan")


def table_recall(trace: Trace, vocabulary: int) -> dict[str, list[float]]:
    """Share of each layer's visits that are among the top K experts of a table.

    The table (`routing.predict.token_table`) is fitted on the first half of the sequences and
    tested on the second, with three keys: the token and the one before it, the token alone, and
    none, which gives the most popular experts. Empty with fewer than two sequences.
    """
    half = sum(trace.lengths[: len(trace.lengths) // 2])
    if half == 0:
        return {}
    contexts = trace.contexts(2)
    early = [ids[:half].long() for ids in trace.expert_ids]
    table = fit_token_table(contexts[:half], early, trace.num_experts, vocabulary)
    asked = contexts[half:]
    alone, nothing = asked.clone(), torch.full_like(asked, -1)
    alone[:, 0] = -1
    nothing[:, 1] = (vocabulary + 2) * vocabulary  # beyond every key of the table
    found: dict[str, list[float]] = {}
    for name, questions in (("pair", asked), ("token", alone), ("popular", nothing)):
        hits = np.zeros((2, len(early)))
        for start in range(0, len(questions), _ROWS):
            table.start(questions[start : start + _ROWS])
            hits += _hits(table, trace, half + start, half + start + _ROWS)
        found[name] = (hits[0] / np.maximum(hits[1], 1)).tolist()
    return found


def _hits(table: TokenTable, trace: Trace, start: int, end: int) -> NDArray[np.float64]:
    """``(2, L)``: visits that the table predicts, and all visits."""
    counts = []
    for layer, ids in enumerate(trace.expert_ids):
        own = ids[start:end].long().numpy()
        evidence = table.evidence(0, layer)
        assert evidence is not None
        named = np.argsort(-evidence, 1, kind="stable")[:, : own.shape[1]]
        common = (own[:, :, None] == named[:, None, :]).any(-1) & (own >= 0)
        counts.append((common.sum(), (own >= 0).sum()))
    return np.array(counts, np.float64).T


def weight_ratios(weights: Sequence[torch.Tensor]) -> list[float]:
    """For each layer, the median of a token's second weight over its first, as the policy `odp`
    needs it; nan with one expert per token."""
    ratios = []
    for own in weights:
        heaviest = own.float().sort(1, descending=True).values
        some = heaviest[heaviest[:, 0] > 0] if own.shape[1] > 1 else heaviest[:0]
        ratios.append(float((some[:, 1] / some[:, 0]).median()) if len(some) else float("nan"))
    return ratios
