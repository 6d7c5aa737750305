"""Drafts without a model: what they say, and that they learn from what became of it."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler, verify
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.ngram import (
    JUDGED,
    KINDS,
    LONGEST,
    SHORTEST,
    SIZES,
    Chances,
    History,
    NGram,
    Offers,
    Recycling,
)

VOCABULARY = 8


repeating = st.one_of(
    st.lists(st.integers(0, 3), max_size=40),
    st.builds(
        lambda first, again, count: first + again * count,
        st.lists(st.integers(0, 3), max_size=9),
        st.lists(st.integers(0, 3), min_size=1, max_size=9),
        st.integers(1, 9),
    ),
)


class FakeSequence:
    def __init__(self, prompt: list[int], new: list[int]) -> None:
        self.prompt_token_ids, self.token_ids = prompt, new


def sequence(prompt: list[int], *new: int) -> Any:
    return cast(RunningSequence, FakeSequence(prompt, list(new)))


class Asked:
    """One source."""

    def __init__(self, source: Any) -> None:
        self.source, self._offers = source, Offers([source])

    def offer(self, one: Any, limit: int) -> Draft:
        return next(iter(self._offers.of([one], [limit])[0]), PLAIN)


def oracle(tokens: list[int], limit: int) -> tuple[list[int], int]:
    """By looking at every place; the longest of `SIZES` up to which the runs are alike."""
    for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                pairs = zip(tokens[end - 1 :: -1], tokens[::-1], strict=False)
                alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                found = tokens[end:]
                return (found * limit)[:limit], max(size for size in SIZES if size <= alike)
    return [], 0


@given(repeating, st.integers(1, 9), st.data())
def test_history_finds_what_looking_everywhere_finds(
    tokens: list[int], limit: int, data: st.DataObject
) -> None:
    history, place = History(), 0
    while place < len(tokens):
        step = data.draw(st.integers(1, 7))
        history.extend(tokens[place : place + step])
        place += step
    assert (history.following(limit), history.size) == oracle(tokens, limit)


def test_ngram_reads_prompt_and_new_tokens() -> None:
    source = Asked(NGram())
    one = sequence([1, 2, 3, 4, 5], 6, 2, 3)
    assert source.offer(one, 2).tokens == (4, 5)
    one.token_ids += [4, 7]
    assert source.offer(one, 4) is PLAIN
    one.token_ids += [2, 3, 4]
    assert source.offer(one, 1).tokens == (7,)  # the last time counts


def test_ngram_goes_round_what_repeats_itself() -> None:
    assert Asked(NGram()).offer(sequence([1, 2, 3, 1, 2, 3]), 7).tokens == (1, 2, 3, 1, 2, 3, 1)


def test_ngram_is_as_sure_as_runs_of_that_length_have_been_followed_alike() -> None:
    """Drafted or not; with right tokens the run is longer, and counted as another kind."""
    source, one = Asked(NGram()), sequence([1, 2, 3, 1, 2])
    assert source.offer(one, 3).confidence == (2 / 4, 3 / 5, 4 / 6)
    for new in range(10, 200):  # 1, 2 is never followed by the same again
        one.token_ids += [new, 1, 2]
        source.offer(one, 1)
    assert source.offer(one, 3) is PLAIN
    for _ in range(60):  # and what is longer always
        one.token_ids += [5, 6, 7, 8, 9]
        source.offer(one, 1)
    assert min(source.offer(one, 4).confidence) > 0.9


def oracle_of_chances(tokens: list[int], steps: list[int], limit: int) -> list[float]:
    """Of runs by length: each step's guess, and behind each wrong token of those that came in a
    step another one, judged token by token."""
    chances, place = Chances([size / (size + 2) for size in SIZES]), 0
    guess: list[tuple[int, int]] = []
    for step in steps:
        for end in range(place, place + step):
            if guess:
                (token, kind), *guess = guess
                chances.count(kind, tokens[end] == token)
            else:
                token = -1
            if token != tokens[end] or not guess:
                found, size = oracle(tokens[: end + 1], JUDGED)
                guess = [(t, KINDS[size + i]) for i, t in enumerate(found)]
        place += step
        found, size = oracle(tokens[:place], limit)
        guess = [(token, KINDS[size + i]) for i, token in enumerate(found)]
    return chances.known


@given(repeating, st.integers(1, 9), st.data())
def test_every_token_that_came_judges_the_guess_before_it(
    tokens: list[int], limit: int, data: st.DataObject
) -> None:
    source, steps = NGram(), list[int]()
    own = source.new_state()
    while sum(steps) < len(tokens):
        steps.append(data.draw(st.integers(1, min(JUDGED, len(tokens) - sum(steps)))))
        source.take(own, tokens[sum(steps[:-1]) : sum(steps)])
        source.following(own, limit)
    assert source._chances.known == pytest.approx(oracle_of_chances(tokens, steps, limit))


@given(repeating, st.integers(1, 9), st.data())
def test_what_is_offered_depends_on_the_tokens_and_not_on_when_it_was_asked(
    tokens: list[int], limit: int, data: st.DataObject
) -> None:
    one, asked = sequence(tokens[:3]), Asked(NGram())
    for token in tokens[3:]:
        one.token_ids.append(token)
        if data.draw(st.booleans()):
            asked.offer(one, limit)
    offer, (expected, _) = asked.offer(one, limit), oracle(tokens, limit)
    assert list(offer.tokens) in (expected, [])


def test_recycling_says_what_was_thought_last() -> None:
    source, one = Asked(Recycling()), sequence([], 1)
    assert source.offer(one, 3) is PLAIN
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 2] = logits[1, 5] = logits[2, 1] = 9.0
    draft = Draft.sure(source.source.mode, [3, 5], [1.0, 1.0])
    sampler = Sampler(SamplingParams(temperature=0), [], VOCABULARY)
    (verified,) = verify([sampler], [draft.guesses], [logits])
    assert [token.id for token in verified.tokens] == [2]
    source.source.learn(draft, 0, verified)
    one.token_ids.append(2)  # 3 was wrong, and 5 would have followed it, and 1 that
    assert source.offer(one, 4) is PLAIN
    one.token_ids.append(3)
    assert source.offer(one, 4).tokens == (5, 1, 2, 3)


def test_recycling_is_as_sure_as_a_token_has_been_followed_alike() -> None:
    source, one = Asked(Recycling()), sequence([1, 2, 1, 3])
    source.offer(one, 1)
    one.token_ids += [1]
    assert source.offer(one, 1) is PLAIN
    one.token_ids += [3, 1] * 12
    sure = source.offer(one, 1)
    assert sure.tokens == (3,)
    assert sure.confidence[0] > 0.9


@given(st.lists(st.booleans(), max_size=400))
def test_chances_follow_what_came_last(seen: list[bool]) -> None:
    chances = Chances([0.5, 0.5])
    for right in seen:
        chances.count(1, right)
    weights = [Chances.KEEP**age for age in range(len(seen))]
    first = Chances.KEEP ** len(seen)
    good = first + sum(w for w, right in zip(weights, reversed(seen), strict=True) if right)
    assert chances.known == [0.5, pytest.approx(good / (2 * first + sum(weights)))]
