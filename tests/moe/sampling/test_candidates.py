"""Filters against a plain numpy implementation, by candidate set; and the ends of a draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sampling import draws, host
from moe.sampling.batch import candidates
from moe.sampling.params import SamplingParams

INF = float("inf")

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-INF, -2.5, -1.0, 0.0, 0.0, 0.5, 2.0, 7.0]), min_size=1).filter(
    lambda row: max(row) > -INF
)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0, 1e-300, 1e300]),
        "top_k": st.integers(0, 12),
        "top_p": st.sampled_from([1.0, 0.97, 0.6, 0.31, 1e-6, 0.0]),
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
    total, mass = sum(weights[order]), 0.0
    nucleus: list[int] = []
    for i in order:
        if not nucleus or params.top_p == 1.0 or mass < params.top_p * total - 1e-12:
            nucleus.append(i)
        mass += weights[i]
    kept = [i for i in nucleus if weights[i] >= params.min_p and weights[i] > 0]
    probabilities = np.zeros(len(x))
    probabilities[kept] = weights[kept] / sum(weights[kept])
    return probabilities


@given(LOGITS, FILTERS)
def test_candidates_are_those_of_the_brute_force(
    logits: list[float], filters: dict[str, float]
) -> None:
    params = SamplingParams(**filters)  # type: ignore[arg-type]
    ids, weights = candidates(torch.tensor(logits), params)
    got = np.zeros(len(logits))
    got[ids] = weights / weights.sum()
    np.testing.assert_allclose(got, expected_probabilities(logits, params), atol=1e-12)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_top_p_over_a_vocabulary_larger_than_the_first_guess(top_p: float) -> None:
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    params = SamplingParams(top_p=top_p)
    ids, _ = candidates(torch.from_numpy(logits), params)
    assert set(ids.tolist()) == set(expected_probabilities(logits.tolist(), params).nonzero()[0])


@pytest.mark.parametrize("spread", [1, 700])
def test_the_ends_of_the_uniform_never_draw_a_token_of_weight_zero(spread: int) -> None:
    """Also where single tokens are looked at in one block only."""
    weights = torch.zeros(5, 5 * spread, dtype=torch.float64)
    weights[:, spread], weights[:, 3 * spread] = 0.1, 0.2
    ends = [0.0, 0.2, 0.5, 1 - 2**-51, draws.MOST_UNIFORM]
    uniforms = torch.tensor(ends, dtype=torch.float64)[:, None]
    drawn = draws.draw(weights, uniforms)[:, 0].tolist()
    assert drawn == [spread, spread, 3 * spread, 3 * spread, 3 * spread]
    assert drawn == [host.position(weights[0].numpy(), end) for end in ends]
