"""Tokens that are given and their log-probabilities."""

from __future__ import annotations

import pytest
import torch

from moe.sampling.batch import LogitsError, score

INF = float("inf")


def test_given_tokens_are_scored_and_broken_logits_refused() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -INF, 0.0]])
    first, second = score([0, 1], logits, 2)
    rows = logits.double().log_softmax(1)
    assert first.logprob == pytest.approx(float(rows[0, 0]))
    assert [token_id for token_id, _ in first.top or ()] == [1, 2]  # a tie: the lower id first
    assert second.logprob == -INF
    with pytest.raises(LogitsError, match="the logits hold NaN"):
        score([0], logits.new_full((1, 3), float("nan")), 2)
