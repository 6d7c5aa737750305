"""Drafted tokens that stay on the device are those that the host would draft."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sampling import drafted, host
from moe.sampling.drafted import DraftedTokens
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from tests.readbacks import readbacks

VOCABULARY = 40
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.0},
]


@given(st.lists(st.sampled_from(WAYS), min_size=1, max_size=5), st.integers(0, 999), st.booleans())
def test_they_are_those_of_the_host(ways: list[dict[str, Any]], seed: int, at_once: bool) -> None:
    """With their probabilities, and what they were drawn from; in one part or in many."""
    logits = 3 * torch.randn(
        2, len(ways), VOCABULARY, generator=torch.Generator().manual_seed(seed)
    )
    samplers = [Sampler(SamplingParams(**way), [1], VOCABULARY) for way in ways]
    random.seed(seed)
    expected = [sampler.fork() for sampler in samplers]
    random.seed(seed)
    forks = [sampler.fork() for sampler in samplers]
    most = 1 << 26 if at_once else VOCABULARY
    for place, logits_BV in enumerate(logits):
        with (
            patch.object(host, "on_host", lambda _: False),
            patch("moe.sampling.batch._CACHED", most),
        ):
            drawn = DraftedTokens(forks, logits_BV, place)
        tokens = drawn.ids_B.tolist()
        told = drawn.told_B2.tolist()
        found = zip(expected, logits_BV, tokens, told, drawn.proposals(tokens), strict=True)
        for fork, logits_V, token, numbers, proposal in found:
            token_id, chance, offered = fork.propose(logits_V)
            assert (token, numbers[0]) == (token_id, token_id)
            assert numbers[1] == pytest.approx(chance, rel=1e-6)
            assert (proposal is None) == (offered is None)
            if proposal is not None and offered is not None:
                assert proposal.token_id == token_id
                kept = proposal.chances_C > 0
                torch.testing.assert_close(proposal.ids_C[kept], offered.ids_C)
                torch.testing.assert_close(proposal.chances_C[kept], offered.chances_C)


def test_no_draft_waits_for_the_device_or_looks_at_many_tokens() -> None:
    """One that no number of candidates is enough for is drawn from the likeliest all the same."""
    forks = [Sampler(SamplingParams(**way), [1], VOCABULARY).fork() for way in WAYS]
    forks.append(Sampler(SamplingParams(temperature=1.0), [1], VOCABULARY).fork())
    logits_BV = torch.randn(len(forks), VOCABULARY)
    made: list[DraftedTokens] = []
    with patch.object(host, "on_host", lambda _: False), patch.object(drafted, "CANDIDATES", 4):
        assert not readbacks(lambda: made.append(DraftedTokens(forks, logits_BV, 0)))
    (drawn,) = made
    proposals = drawn.proposals(drawn.ids_B.tolist())
    assert [proposal is None for proposal in proposals] == [True] * 4 + [False] * 5
    for proposal, logits_V in zip(proposals, logits_BV, strict=True):
        if proposal is not None:
            assert proposal.ids_C.tolist() == logits_V.topk(4).indices.tolist()
            assert float(proposal.chances_C.sum()) == pytest.approx(1.0)


def test_what_is_no_number_has_no_chance() -> None:
    forks = [Sampler(SamplingParams(**way), [1], VOCABULARY).fork() for way in WAYS]
    logits_BV = torch.randn(len(forks), VOCABULARY)
    logits_BV[:, 5] = torch.nan
    with patch.object(host, "on_host", lambda _: False):
        drawn = DraftedTokens(forks, logits_BV, 0)
    assert drawn.told_B2[:, 1].isnan().all()
    assert ((drawn.ids_B >= 0) & (drawn.ids_B < VOCABULARY)).all()
