"""Lengths, arrivals and prompts have the statistics that they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.traces import TRACES, Lengths, PromptMaker, poisson_arrivals, request_lengths
from examples.models.random_models import tokenizer as rule_tokenizer

DEMO_TOKENIZER = Path(__file__).parents[2] / "examples/demo-model/tokenizer.json"


@pytest.mark.parametrize("lengths", [t for trace in TRACES.values() for t in vars(trace).values()])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_lengths_have_the_mean_and_spread_of_their_trace(lengths: Lengths, scale: float) -> None:
    sample = lengths.sample(200_000, scale, np.random.default_rng(0))
    assert sample.mean() == pytest.approx(lengths.mean * scale, rel=0.02)
    spread = np.percentile(sample, 90) / np.percentile(sample, 50)
    assert spread == pytest.approx(lengths.spread, rel=0.03)


@given(
    st.sampled_from(list(TRACES)),
    st.floats(0.001, 4),
    st.integers(4, 40_000),
    st.integers(0, 2**32),
)
def test_requests_fit_into_the_context(trace: str, scale: float, context: int, seed: int) -> None:
    for prompt, answer in request_lengths(
        TRACES[trace], 20, scale=scale, context=context, seed=seed
    ):
        assert prompt >= 1
        assert answer >= 1
        assert prompt + answer <= context


def test_a_seed_gives_the_same_requests_again() -> None:
    def draw(seed: int) -> list[tuple[int, int]]:
        return request_lengths(TRACES["arxiv"], 8, scale=1, context=32768, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = np.array(poisson_arrivals(5.0, 50_001, seed=0))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.02)  # as of the exponential distribution


@pytest.mark.parametrize("which", ["shipped", "made by a rule"])
def test_prompts_have_exactly_the_tokens_asked_for(which: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    if which != "shipped":
        tokenizer = rule_tokenizer(8192).backend_tokenizer
    prompts = PromptMaker(tokenizer, seed=3)
    texts = [prompts.make(tokens) for tokens in (1, 2, 57, 400)]
    assert [len(tokenizer.encode(text).ids) for text in texts] == [1, 2, 57, 400]
    assert len(set(tokenizer.encode(texts[-1]).ids)) > 100
    assert prompts.make(57) != texts[2]


@given(st.text())
def test_the_tokenizer_made_by_a_rule_knows_every_text(text: str) -> None:
    ids = RULE_TOKENIZER.encode(text)
    assert RULE_TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


RULE_TOKENIZER = rule_tokenizer(1024)


def test_the_tokenizer_made_by_a_rule_has_the_vocabulary_of_its_model() -> None:
    tokenizer = rule_tokenizer(32768)
    assert len(tokenizer) == 32768
    assert tokenizer.eos_token is None
    assert tokenizer.tokenize(" abc zz") == ["Ġabc", "Ġzz"]
