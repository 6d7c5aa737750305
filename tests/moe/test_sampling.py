"""Sampling against a plain numpy implementation, by distribution and by candidate set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare  # type: ignore[import-untyped]

from moe.sampling import LogitsError, Sampler, _draw, candidates
from moe.sampling_params import SamplingParams

INF = float("inf")

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-INF, -2.5, -1.0, 0.0, 0.0, 0.5, 2.0, 7.0]), min_size=1).filter(
    lambda row: max(row) > -INF
)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0, 1e-300, 1e300]),
        "top_k": st.integers(0, 12),
        "top_p": st.sampled_from([1.0, 0.97, 0.6, 0.31, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.013, 0.4, 1.0]),
    }
)


def expected_probabilities(scores: Sequence[float], params: SamplingParams) -> np.ndarray:
    """(V,) float64 probabilities after every filter, one token after the other."""
    x = np.array(scores, dtype=np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((x - x.max()) / params.temperature)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, mass, nucleus = sum(weights[order]), 0.0, []
    for i in order:
        if params.top_p == 1.0 or mass < params.top_p * total - 1e-12:
            nucleus.append(i)
        mass += weights[i]
    kept = [i for i in nucleus if weights[i] >= params.min_p and weights[i] > 0]
    probabilities = np.zeros(len(x))
    probabilities[kept] = weights[kept] / sum(weights[kept])
    return probabilities


def scores_of(logits: Sequence[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64)


@given(LOGITS, FILTERS)
def test_candidates_are_those_of_the_brute_force(
    logits: list[float], filters: dict[str, float]
) -> None:
    params = SamplingParams(**filters)  # type: ignore[arg-type]
    ids, weights = candidates(scores_of(logits), params)
    got = np.zeros(len(logits))
    got[ids.numpy()] = (weights / weights.sum()).numpy()
    np.testing.assert_allclose(got, expected_probabilities(logits, params), atol=1e-12)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_top_p_over_a_vocabulary_larger_than_the_first_guess(top_p: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)).double()
    params = SamplingParams(top_p=top_p)
    ids, _ = candidates(logits, params)
    assert set(ids.tolist()) == set(expected_probabilities(logits.tolist(), params).nonzero()[0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, temperature=1.7),
        SamplingParams(seed=4, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = [0.0, 1.5, -INF, 0.3, 0.3, -1.0, 2.0, 1.1, -3.0, 0.9, -0.2, 1.8]
    sampler = Sampler(params, [], len(logits))
    row = torch.tensor(logits)
    draws = [sampler.sample(row).id for _ in range(20_000)]
    seen = np.bincount(draws, minlength=len(logits))
    expected = expected_probabilities(torch.tensor(logits).tolist(), params) * len(draws)
    possible = expected > 0
    assert not seen[~possible].any()
    assert chisquare(seen[possible], expected[possible]).pvalue > 1e-3


def test_the_ends_of_the_uniform_never_draw_a_token_of_weight_zero() -> None:
    weights = torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0], dtype=torch.float64)
    assert [_draw(weights, u) for u in (0.0, 0.2, 0.5, 1 - 2**-53, 1.0)] == [1, 1, 3, 3, 3]


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


@given(st.integers(0, 2**63 - 1), st.integers(0, 3))
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
    streams = {tuple(s.sample(row).id for _ in range(8)) for s in samplers}
    assert len(streams) == len(samplers)


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
