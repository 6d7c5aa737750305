"""The token table: which experts a token used in calibration, by its id and the id before it.

It answers as soon as a token is sampled, for all layers, with two look-ups. A token v has
``P[v] = (count[v] + s marginal) / (n[v] + s)``; a pair of tokens that was seen more than once has
the same with P[v] in place of the marginal. Each row keeps only its likeliest experts.
Legend: N tokens of the trace, S rows of the table, L layers, E experts, M kept ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing.predict.ensemble import EvidenceSource, Tensors, sigmoid
from routing.predict.forecast import Floats

_SMOOTHING = {1: 8.0, 2: 1.0}  # s, for keys of one and of two tokens
_MAX_BYTES = 64 << 20
_LEAST_ODDS, _MOST_ODDS = 1e-4, 1 - 1e-4


@dataclass(frozen=True)
class _TableLevel:
    """The rows for keys of one length, and the row that each token of the trace counts for."""

    keys: Tensor  # (S,), sorted
    counts: Tensor  # (S,)
    row_of: Tensor  # (N,), -1 for tokens whose key has no row


class TokenTable(EvidenceSource):
    """Keys are ``token`` and ``(before + 1) * V + token``; row 0 is for unknown tokens.

    Args:
        keys: ``(S - 1,)`` int64, ascending, for the rows from 1 on.
        experts: ``(S, L, M)`` int16, the likeliest experts.
        log_odds: ``(S, L, M)`` float16, of these.
        others: ``(S, L)`` float16, log odds of every other expert.
        num_experts: E of each layer.
        vocabulary: V; token ids are smaller.
    """

    name = "token_table"
    context = 2

    def __init__(
        self, keys: Tensor, experts: Tensor, log_odds: Tensor, others: Tensor,
        num_experts: Sequence[int], vocabulary: int,
    ) -> None:  # fmt: skip
        self._tensors = {
            "keys": keys, "experts": experts, "log_odds": log_odds, "others": others
        }  # fmt: skip
        self._keys: NDArray[np.int64] = keys.numpy()
        self._num_experts, self._vocabulary = list(num_experts), vocabulary
        self._tokens: NDArray[np.int64] | None = None
        self._evidence: Floats | None = None

    def start(self, tokens: Tensor) -> None:
        self._tokens, self._evidence = tokens[:, -2:].cpu().numpy(), None

    def evidence(self, layer: int, target: int) -> Floats | None:
        del layer
        if self._evidence is None:
            assert self._tokens is not None, "start() comes first"
            rows = self._rows(self._tokens)
            named, log_odds, others = (
                self._tensors[part].numpy()[rows] for part in ("experts", "log_odds", "others")
            )
            table = np.repeat(others.astype(np.float32)[..., None], max(self._num_experts), 2)
            np.put_along_axis(table, named.astype(np.int64), log_odds.astype(np.float32), 2)
            self._evidence = table
        return self._evidence[:, target, : self._num_experts[target]]

    def visits(self, tokens: Tensor, step: Tensor, steps: int, layer: int) -> Floats:
        """``(S, E)``: how many tokens of each step each expert of a layer should get.

        Args:
            tokens: contexts ``(T, W)`` of all steps.
            step: ``(T,)`` the step of each token.
            steps: S.
        """
        rows, size = self._rows(tokens[:, -self.context :].numpy()), self._num_experts[layer]
        named, log_odds, others = (
            self._tensors[part].numpy()[rows, layer] for part in ("experts", "log_odds", "others")
        )
        other = sigmoid(others.astype(np.float32))
        more = sigmoid(log_odds.astype(np.float32)) - other[:, None]
        slots = step.numpy()[:, None] * size + named
        found = np.bincount(slots.reshape(-1), more.reshape(-1), steps * size).reshape(steps, size)
        found += np.bincount(step.numpy(), other, steps)[:, None]
        return found.astype(np.float32)

    def _rows(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(T,)`` rows for tokens ``(T, 2)``: the pair's, else the token's, else 0."""
        wanted = np.stack([(tokens[:, 0] + 1) * self._vocabulary + tokens[:, 1], tokens[:, 1]])
        if len(self._keys) == 0:
            return np.zeros(len(tokens), np.int64)
        found = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        rows = np.where(self._keys[found] == wanted, found + 1, 0)
        return np.where(rows[0] > 0, rows[0], rows[1])

    def tensors(self) -> Tensors:
        return self._tensors


def fit_token_table(
    tokens: Tensor, expert_ids: Sequence[Tensor], num_experts: Sequence[int], vocabulary: int
) -> TokenTable:
    """Build the table by counting a trace.

    Args:
        tokens: ``(N, 2)`` int64 contexts: the token before, the token.
        expert_ids: of each layer ``(N, K)``, -1 for none.
        num_experts: E of each layer.
        vocabulary: V.
    """
    kept = min(*num_experts, 4 * max(ids.shape[1] for ids in expert_ids))
    limit = _MAX_BYTES // (4 * kept * len(num_experts))
    single = _level(tokens[:, -1], 1, limit)
    keys = (tokens[:, 0] + 1) * vocabulary + tokens[:, 1]
    keys = keys.where(tokens[:, 0] >= 0, -1)  # the first token of a sequence has no pair
    pairs = _level(keys, 2, max(limit - len(single.keys), 0))
    falls_back = torch.searchsorted(single.keys, pairs.keys % vocabulary)
    layers = []
    for ids, experts in zip(expert_ids, num_experts, strict=True):
        marginal = _count(ids, torch.zeros(len(ids), dtype=torch.int64), 1, experts) / len(ids)
        ones = _blend(single, ids, marginal, 1)
        twos = _blend(pairs, ids, ones[falls_back] if len(ones) else ones, 2)
        layers.append(_compress(torch.cat([marginal, ones, twos]), kept))
    named, log_odds, others = (torch.stack(part, 1) for part in zip(*layers, strict=True))
    keys = torch.cat([single.keys, pairs.keys])
    return TokenTable(keys, named, log_odds, others, num_experts, vocabulary)


def _level(keys: Tensor, least: int, limit: int) -> _TableLevel:
    """Rows for the ``limit`` most frequent keys >= 0 that occur at least ``least`` times."""
    distinct, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    often = counts.argsort(descending=True, stable=True)[:limit]
    chosen = often[(counts[often] >= least) & (distinct[often] >= 0)].sort().values
    row = torch.full_like(counts, -1)
    row[chosen] = torch.arange(len(chosen))
    return _TableLevel(distinct[chosen], counts[chosen], row[inverse])


def _count(ids: Tensor, row_of: Tensor, rows: int, experts: int) -> Tensor:
    """``(rows, E)`` float32: how many tokens of each row used each expert."""
    slots = row_of[:, None] * experts + ids.long()
    slots = slots[(row_of[:, None] >= 0) & (ids >= 0)]
    return torch.bincount(slots, minlength=rows * experts).view(rows, experts).float()


def _blend(level: _TableLevel, ids: Tensor, fallback: Tensor, tokens: int) -> Tensor:
    counts = _count(ids, level.row_of, len(level.keys), fallback.shape[1])
    weight = _SMOOTHING[tokens]
    return (counts + weight * fallback) / (level.counts[:, None] + weight)


def _compress(probability: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest experts, their log odds, and the log odds of the others' mean probability."""
    best, experts = probability.topk(kept, -1)
    left = max(probability.shape[1] - kept, 1)
    others = (probability.sum(-1) - best.sum(-1)).clamp_min(0) / left
    odds = [p.clamp(_LEAST_ODDS, _MOST_ODDS).logit().half() for p in (best, others)]
    return experts.to(torch.int16), odds[0], odds[1]
