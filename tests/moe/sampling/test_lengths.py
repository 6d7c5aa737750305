"""Rules of length: a least number of tokens, and a most of reasoning, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.sampling.lengths import LengthRules
from moe.sampling.params import SamplingParams, ThinkingBudget
from moe.sampling.sampler import Sampler, verify
from moe.text.tool_calls.reasoning import ReasoningFormat, ReasoningParser

LETTERS = ["$", *"<>/tx \n", "<t>", "</t>", "abc<"]
END = 0
OPEN, CLOSE = "<t>", "</t>"


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in text)


def sampler_of(
    min_tokens: int = 0, thinking: ThinkingBudget | None = None, **params: Any
) -> Sampler:
    own = SamplingParams(min_tokens=min_tokens, thinking=thinking, **params)
    lengths = LengthRules(min_tokens, [END], thinking, decode)
    return Sampler(own, [], len(LETTERS), lengths=lengths)


def logits_of(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, len(LETTERS), generator=generator)


def drawn(sampler: Sampler, logits_TV: torch.Tensor) -> list[int]:
    return [sampler.sample(row).id for row in logits_TV]


CLOSINGS = st.sampled_from([ids_of(CLOSE), (LETTERS.index(CLOSE),)])


@given(
    st.integers(0, 2**20), st.integers(0, 12), st.booleans(), CLOSINGS, st.sampled_from([0.0, 1.0])
)
def test_reasoning_ends_after_its_budget_and_only_then_is_its_end_forced(
    seed: int, budget: int, inside: bool, closing: tuple[int, ...], temperature: float
) -> None:
    """The oracle is the parser of answers, which reads texts."""
    thinking = ThinkingBudget(budget, OPEN, CLOSE, closing, inside)
    logits_TV = logits_of(seed, 40)
    params: Any = {"temperature": temperature, "seed": seed}
    got = drawn(sampler_of(thinking=thinking, **params), logits_TV)
    parser = ReasoningParser(ReasoningFormat(OPEN, CLOSE), inside=inside)
    spent, found = 0, False
    for token_id in got:
        parser.push(LETTERS[token_id])
        spent += not parser.over
        found = parser.found
    assert not found or parser.over or budget + len(closing) > 40 - 3
    assert not found or spent <= max(budget, 3) + len(closing)
    free = drawn(sampler_of(**params), logits_TV)
    agree = next(
        (i for i, pair in enumerate(zip(got, free, strict=True)) if pair[0] != pair[1]), 40
    )
    assert agree == 40 or agree >= budget
    if agree < 40:
        assert got[agree] in closing


@given(st.integers(0, 2**20), st.integers(0, 6), st.integers(0, 9), st.booleans())
def test_drafts_change_no_token(seed: int, budget: int, least: int, right: bool) -> None:
    thinking = ThinkingBudget(budget, OPEN, CLOSE, ids_of(CLOSE), inside=True)
    logits_TV = logits_of(seed, 12)
    rules: Any = {"min_tokens": least, "thinking": thinking, "temperature": 0}
    plain = drawn(sampler_of(**rules), logits_TV)
    own = sampler_of(**rules)
    guesses = plain[:-1] if right else [(token + 1) % len(LETTERS) for token in plain[:-1]]
    (found,) = verify([own], [[(token, None) for token in guesses]], [logits_TV])
    accepted = [token.id for token in found.tokens]
    assert accepted == plain[: len(accepted)]
    assert len(accepted) == (12 if right else 1)
    rest = drawn(own, logits_TV[len(accepted) :])
    assert [*accepted, *rest] == plain
    assert sampler_of(**rules).fork().sample(logits_TV[0]).id == plain[0]


def test_a_text_has_its_least_tokens() -> None:
    logits_TV = torch.zeros(5, len(LETTERS))
    logits_TV[:, END], logits_TV[:, 3] = 9.0, 1.0
    assert drawn(sampler_of(3, temperature=0), logits_TV) == [3, 3, 3, END, END]
    assert drawn(sampler_of(3, temperature=1.0, seed=1), logits_TV)[3:] == [END, END]
    assert END not in drawn(sampler_of(3, temperature=1.0, seed=1), logits_TV)[:3]
    sampler = sampler_of(1, temperature=0)
    assert sampler.needs_tokens
    assert not sampler.is_argmax
    sampler.sample(logits_TV[0])
    assert sampler.is_argmax, "steps may run ahead again"


def test_reasoning_on_channels_may_begin_again_and_the_budget_is_spent() -> None:
    thinking = ThinkingBudget(2, "<t>", "</t>", (9,), inside=True, reopens=True)
    logits_TV = torch.zeros(9, len(LETTERS))
    logits_TV[:, 4] = 1.0
    logits_TV[3, 8] = 2.0  # the reasoning begins again
    assert drawn(sampler_of(thinking=thinking, temperature=0), logits_TV)[:6] == [4, 4, 9, 8, 9, 4]


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"min_tokens": -1}, "min_tokens must be a whole number >= 0, got -1"),
        (
            {"min_tokens": 9, "max_new_tokens": 8},
            r"min_tokens must be at most max_new_tokens \(8\)",
        ),
        ({"thinking": 3}, "thinking must be a ThinkingBudget or None, got 3"),
    ],
)
def test_values_that_are_not_valid(params: Any, rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        SamplingParams(**params)
    with pytest.raises(RequestError, match="thinking_token_budget must be a whole number >= 0"):
        ThinkingBudget(-1, OPEN, CLOSE, (), inside=True)
