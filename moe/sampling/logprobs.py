"""Tokens with their log-probabilities, drawn or given, and logits that say nothing of any token.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moe.sampling.candidates import largest, row_of


class LogitsError(FloatingPointError):
    """The model produced logits that no token can be drawn from; only their sequence fails."""


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen or given token; log-probabilities are natural, `None` where not asked for.

    They are the log-softmax of the model's own logits, before bias, penalties, structure,
    temperature and filters. `top` holds the most likely ids in falling order, the chosen one among
    them or not. `is_last`: it completes a text to which its structure lets nothing be added.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    is_last: bool = False


def scored(token_id: int, raw_V: np.ndarray, count: int) -> Token:
    """A token with its log-probability and those of the ``count`` most likely ones."""
    peak = raw_V.max()
    normaliser = peak + np.log(np.exp(raw_V - peak).sum())
    top_ids = largest(raw_V, min(count, len(raw_V))) if count else np.empty(0, dtype=np.int64)
    top_logprobs = (raw_V[top_ids] - normaliser).tolist()
    top = tuple(zip(top_ids.tolist(), top_logprobs, strict=True))
    return Token(token_id, float(raw_V[token_id] - normaliser), top)


def score(token_ids: Sequence[int], logits_TV: Tensor, count: int) -> list[Token]:
    """Tokens that are given, not drawn, each with the ``count`` most likely ones beside it.

    Token i is the one that follows row i of ``(T, V)`` logits of any float dtype and device.
    Raises `LogitsError` where a row says nothing.
    """
    tokens = []
    for token_id, logits_V in zip(token_ids, logits_TV, strict=True):
        raw_V = row_of(logits_V)
        check_peak(float(raw_V.max()))
        tokens.append(scored(token_id, raw_V, count))
    return tokens


def check_peak(peak: float) -> None:
    """Raise `LogitsError` where the largest logit of a row is none to draw by."""
    # max and argmax hand a NaN on, so that the largest logit answers for the whole row.
    if peak != peak:
        raise LogitsError("the logits hold NaN")
    if peak == float("inf"):
        raise LogitsError("the logits hold +inf")
    if peak == float("-inf"):
        raise LogitsError("every token is masked: all logits are -inf")
