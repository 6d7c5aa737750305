"""Samplers: penalties, bias, log-probabilities, seeds and logits that cannot be used."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from moe.sampling.batch import LogitsError
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler

INF = float("inf")


@given(
    st.lists(st.sampled_from([-INF, -3.0, -0.5, 0.0, 0.25, 4.0]), min_size=6, max_size=6).filter(
        lambda row: max(row) > -INF
    ),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-1.1, 0.0, 2.0]),
)
def test_penalties_are_those_of_the_brute_force(
    logits: list[float], prompt: list[int], repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    sampler = Sampler(params, prompt, 6)
    generated: list[int] = []
    for _ in range(6):
        scores = []
        for token_id, logit in enumerate(logits):
            if token_id in prompt + generated:
                logit = logit / repetition if logit > 0 else logit * repetition
            count = generated.count(token_id)
            scores.append(logit - frequency * count - presence * (count > 0))
        token = sampler.sample(torch.tensor(logits))
        assert token.id == scores.index(max(scores))
        generated.append(token.id)


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_an_extreme_repetition_penalty_still_draws_a_token(penalty: float) -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=penalty, seed=0), [0, 1], 3)
    assert sampler.sample(torch.tensor([1e38, -1e38, 3.0])).id in (0, 2)


def test_greedy_takes_the_lower_id_of_a_tie() -> None:
    row = torch.tensor([0.0, 3.0, 3.0])
    assert Sampler(SamplingParams(temperature=0), [], 3).sample(row).id == 1
    assert Sampler(SamplingParams(temperature=0, logprobs=0), [], 3).sample(row).id == 1


def test_logprobs_are_of_the_raw_logits_and_ties_go_to_the_lower_id() -> None:
    row = torch.tensor([1.0, 2.0, -INF, 2.0, 0.0])
    expected = torch.log_softmax(row.double(), 0)
    params = SamplingParams(temperature=0, logprobs=3, presence_penalty=2, repetition_penalty=3)
    token = Sampler(params, [1, 3], 5).sample(row)
    assert token.id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert token.top is not None
    assert [token_id for token_id, _ in token.top] == [1, 3, 0]
    assert [value for _, value in token.top] == pytest.approx(expected[[1, 3, 0]].tolist())


def test_logprobs_zero_and_none_report_no_alternatives() -> None:
    row = torch.zeros(4)
    token = Sampler(SamplingParams(logprobs=0), [], 4).sample(row)
    assert token.logprob == pytest.approx(-np.log(4))
    assert token.top == ()
    silent = Sampler(SamplingParams(), [], 4).sample(row)
    assert (silent.logprob, silent.top) == (None, None)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 3))
@settings(max_examples=20)
def test_a_seed_fixes_a_sequence_whoever_else_is_sampled(seed: int, company: int) -> None:
    params = SamplingParams(seed=seed, n=2, top_p=0.9)
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(7))
    alone = Sampler(params, [], 50, index=1)
    expected = [alone.sample(row).id for row in rows]
    others = [Sampler(SamplingParams(), [], 50) for _ in range(company)]
    again = Sampler(params, [], 50, index=1)
    for row, token_id in zip(rows, expected, strict=True):
        for other in others:
            other.sample(row)
        assert again.sample(row).id == token_id


def test_every_bit_of_the_seed_and_every_index_counts() -> None:
    row = torch.zeros(1000)
    params = [SamplingParams(seed=5, n=3), SamplingParams(seed=5 + 2**32), SamplingParams()]
    samplers = [Sampler(params[0], [], 1000, index=i) for i in range(3)]
    samplers += [Sampler(p, [], 1000) for p in (*params[1:], params[2])]
    samplers.append(Sampler(SamplingParams(seed=-5), [], 1000))
    streams = {tuple(s.sample(row).id for _ in range(8)) for s in samplers}
    assert len(streams) == len(samplers)


def test_without_a_seed_chance_is_that_of_pythons_generator() -> None:
    row, streams = torch.zeros(1000), list[list[int]]()
    for seed in (1, 2, 1):
        random.seed(seed)
        sampler = Sampler(SamplingParams(), [], 1000)
        streams.append([one.sample(row).id for one in (sampler, sampler.fork()) for _ in range(8)])
    assert streams[0] == streams[2] != streams[1]
    assert streams[0][:8] != streams[0][8:]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 2, "logprobs": 1}])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.0, float("nan"), 2.0], "the logits hold NaN"),
        ([1.0, INF, 2.0], r"the logits hold \+inf"),
        ([-INF, -INF, -INF], "every token is masked"),
    ],
)
def test_unusable_logits_raise(options: dict[str, float], row: list[float], message: str) -> None:
    with pytest.raises(LogitsError, match=message):
        Sampler(SamplingParams(**options), [], 3).sample(torch.tensor(row))  # type: ignore[arg-type]


def test_bias_moves_the_choice_and_not_the_reported_log_probability() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    plain = logits.double().log_softmax(0)
    for bias, expected in (({0: 4.0}, 0), ({1: -100.0}, 3), ({2: 1.0}, 1), ({3: 100.0}, 3)):
        for temperature in (0.0, 1e-3):
            params = SamplingParams(temperature=temperature, logit_bias=bias, logprobs=1)
            token = Sampler(params, [1], 4).sample(logits)
            assert token.id == expected
            assert token.logprob == pytest.approx(float(plain[expected]))
            assert token.top == ((1, pytest.approx(float(plain[1]))),)
    assert not Sampler(SamplingParams(temperature=0.0, logit_bias={0: 1.0}), [1], 4).is_argmax


def test_biased_tokens_are_drawn_with_the_probabilities_of_biased_logits() -> None:
    logits, bias = torch.tensor([0.0, 1.0, -1.0]), {0: 0.5, 2: 1.5}
    sampler = Sampler(SamplingParams(logit_bias=bias, seed=1), [1], 3)
    counts = np.bincount([sampler.sample(logits).id for _ in range(4000)], minlength=3)
    expected = torch.tensor([0.5, 1.0, 0.5]).double().softmax(0).numpy()
    assert chisquare(counts, 4000 * expected).pvalue > 1e-3
