"""All that is measured on a trace, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.calibrate.trace import Trace
from moe.tracing import locality, tokens
from moe.tracing.locality import Floats, Ids

RUNS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens whose experts are counted together."""

SEGMENT = 16
"""Tokens of a segment whose experts a fixed set serves."""

CACHES = (1, 2, 3, 4)
"""Slots of an oracle's cache, in multiples of K."""

PAIRS = 3
"""Of experts that serve the same tokens most, that are named."""

CAPACITY = 1.25
PARTS = 10
"""A sequence's tenths, from its beginning to its end."""


@dataclass(frozen=True)
class LayerFindings:
    """One MoE layer; shares are of 1, nan where the trace is too short to tell.

    Attributes:
        num_experts, top_k: E, and mean visits of a token.
        load: ``E`` visits.
        max_violation: heaviest load over the mean, minus 1.
        explained: share of the uncertainty about an expert that the token's id takes away.
        recall: of tables, by what they go by (`tokens.table_recall`).
        same_token, same_pair, any_tokens: mean share of common experts of two tokens with the same
            id, with the same id and the same token before, and of any two.
        distinct, distinct_apart, law: experts that `RUNS` of tokens need: consecutive ones, tokens
            from anywhere, and evenly and independently routed ones.
        cache_hits: of an oracle's cache of `CACHES` times K experts, chosen for each segment.
        segment_score: best F1 of one set of experts for a whole segment.
        overflow: share of visits beyond a capacity of `CAPACITY`, by tenths of a sequence.
        weight_ratio: median of a token's second over its first weight.
        pairs: experts that serve the same tokens most beyond chance, with how often beyond it.
        lift: ``(E, E)`` of all pairs (`locality.together`).
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
        model, text: names, for people.
        num_tokens, num_sequences: that were read.
        layers: each MoE layer.
    """

    model: str
    text: str
    num_tokens: int
    num_sequences: int
    layers: list[LayerFindings]

    def mean(self, value: Callable[[LayerFindings], float]) -> float:
        """Over layers where it is known."""
        known = [number for number in map(value, self.layers) if not isnan(number)]
        return float(np.mean(known)) if known else float("nan")

    def as_json(self) -> dict[str, Any]:
        """Plain values; unknown numbers are null. Without those of all pairs of experts: they are
        too many."""
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
    """Measure everything.

    Args:
        trace: at least one token.
        vocabulary: V, which token ids are below.
        model, text: names.
        on_layer: hears how many layers are done.
    """
    recall = tokens.table_recall(trace, vocabulary)
    ratios = tokens.weight_ratios(trace.weights)
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
    segments = locality.visits(ids, lengths, SEGMENT, experts)
    slots = [max(round(times * top_k), 1) for times in CACHES]
    lift = locality.together(ids, experts)
    return LayerFindings(
        num_experts=experts,
        top_k=top_k,
        load=load.tolist(),
        max_violation=float(load.max() / max(load.mean(), 1e-12) - 1),
        explained=tokens.explained(words, ids),
        recall=recall,
        same_token=tokens.agreement(words, ids),
        same_pair=tokens.agreement(pairs, ids),
        any_tokens=tokens.chance_agreement(ids),
        distinct=[locality.distinct(ids, lengths, run, experts) for run in RUNS],
        distinct_apart=[locality.distinct_apart(ids, run, experts) for run in RUNS],
        law=[locality.law(experts, top_k, run) for run in RUNS],
        cache_hits=[locality.cache_best_hits(segments, count) for count in slots],
        segment_score=locality.routing_best_score(segments, SEGMENT),
        overflow=locality.overflow(ids, lengths, experts, CAPACITY, PARTS).tolist(),
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
