"""How far a token's id determines its experts, whatever stands around it (OpenMoE).

Legend: N tokens, K slots a token, E experts, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moe.calibrate.trace import Trace
from moe.tracing.locality import SEED, Ids
from routing.predict.token_table import TokenTable, fit_token_table

_ROWS = 2048


def entropy(counts: NDArray[np.int64]) -> float:
    """Bits of a distribution that is given by counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def explained(tokens: Ids, ids: Ids) -> float:
    """Share of the uncertainty about a visit's expert that the token's id takes away.

    Mutual information over entropy. Rare tokens seem to explain all, so what shuffled tokens
    explain is subtracted.

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
    """Mean share of common experts of two tokens that follow each other among those of equal keys;
    nan where no key comes twice. Negative keys do not count."""
    order = np.argsort(keys, kind="stable")
    same = (keys[order[1:]] == keys[order[:-1]]) & (keys[order[1:]] >= 0)
    return _overlap(ids[order[:-1][same]], ids[order[1:][same]])


def chance_agreement(ids: Ids) -> float:
    """The same of any two tokens."""
    mixed = ids[np.random.default_rng(SEED).permutation(len(ids))]
    return _overlap(mixed[:-1], mixed[1:])


def _overlap(some: Ids, others: Ids) -> float:
    common = (some[:, :, None] == others[:, None, :]) & (some >= 0)[:, :, None]
    total = (some >= 0).sum()
    return float(common.sum() / total) if total else float("nan")


def table_recall(trace: Trace, vocabulary: int) -> dict[str, list[float]]:
    """Share of each layer's visits that are among the K experts that a table names first.

    The table (`routing.predict.token_table`) is counted on the first half of the sequences and
    asked about the second: by the token and the one before it, by the token alone, and by nothing,
    which names the most popular experts. Empty with fewer than two sequences.
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
    """``(2, L)``: visits that were named, and all."""
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
    """Of each layer, the median of a token's second over its first weight; nan with one expert.

    What `odp` takes as its ratios.
    """
    ratios = []
    for own in weights:
        heaviest = own.float().sort(1, descending=True).values
        some = heaviest[heaviest[:, 0] > 0] if own.shape[1] > 1 else heaviest[:0]
        ratios.append(float((some[:, 1] / some[:, 0]).median()) if len(some) else float("nan"))
    return ratios
