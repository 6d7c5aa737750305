"""Drafts without a model: what they say, and that they learn from what became of it."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.engine.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.history import LONGEST, SHORTEST, SIZES, History
from moe.speculate.model_free import ModelFree, NGram, Recycling

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
    source = NGram()
    one = sequence([1, 2, 3, 4, 5], 6, 2, 3)
    assert source.offer(one, 2).tokens == (4, 5)
    one.token_ids += [4, 7]
    assert source.offer(one, 4) is PLAIN
    one.token_ids += [2, 3, 4]
    assert source.offer(one, 1).tokens == (7,)  # the last time counts


def test_ngram_goes_round_what_repeats_itself() -> None:
    assert NGram().offer(sequence([1, 2, 3, 1, 2, 3]), 7).tokens == (1, 2, 3, 1, 2, 3, 1)


def test_ngram_is_as_sure_as_it_has_been_right() -> None:
    source, one = NGram(), sequence([1, 2, 3, 1, 2])
    before = source.offer(one, 3)
    for _ in range(20):
        source.learn(one, before, 0, torch.zeros(4, VOCABULARY))
    assert max(source.offer(one, 3).confidence) < 0.1 < before.confidence[0]
    for _ in range(400):
        source.learn(one, before, 3, torch.zeros(4, VOCABULARY))
    assert source.offer(one, 3).confidence[0] > 0.9


def test_recycling_says_what_was_thought_last() -> None:
    source, one = Recycling(), sequence([], 1)
    assert source.offer(one, 3) is PLAIN
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 2] = logits[1, 5] = logits[2, 1] = 9.0
    source.learn(one, Draft.sure(source.mode, [3, 5], [1.0, 1.0]), 0, logits)
    one.token_ids.append(2)  # 3 was wrong, and 5 would have followed it, and 1 that
    assert source.offer(one, 4) is PLAIN
    one.token_ids.append(3)
    assert source.offer(one, 4).tokens == (5, 1, 2, 3)


def test_recycling_is_as_sure_as_a_token_has_been_followed_alike() -> None:
    source, one = Recycling(), sequence([1, 2, 1, 3])
    source.offer(one, 1)
    one.token_ids += [1]
    unsure = source.offer(one, 1)
    one.token_ids += [3, 1] * 12
    sure = source.offer(one, 1)
    assert (unsure.tokens, sure.tokens) == ((3,), (3,))
    assert unsure.confidence[0] < 0.3 < 0.9 < sure.confidence[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_drafts_are_judged_as_if_they_had_been_verified(
    tokens: list[int], limit: int, recycling: bool
) -> None:
    """Tokens that came while nobody looked: the same drafts, and the same of them right, as a
    sequence would have seen that was offered each of them."""
    sources = [Recycling(), Recycling()] if recycling else [NGram(), NGram()]
    judged_one, offered_one = sequence([1, 2, 1]), sequence([1, 2, 1])
    for source, one in zip(sources, (judged_one, offered_one), strict=True):
        source.offer(one, limit)
    judged_one.token_ids += tokens
    judged = sources[0].judge(judged_one, limit, len(tokens))
    came, expected = tokens, []
    while came:
        draft = sources[1].offer(offered_one, min(limit, len(came)))
        right = 0
        while right < len(draft.tokens) and draft.tokens[right] == came[right]:
            right += 1
        expected.append((list(draft.confidence), right))
        if not recycling and draft.tokens:
            sources[1].learn(offered_one, draft, right, torch.zeros(0, VOCABULARY))
        offered_one.token_ids += came[: right + 1]
        came = came[right + 1 :]
    assert judged == expected
    assert sources[0].offer(judged_one, 3) == sources[1].offer(offered_one, 3)


@pytest.mark.parametrize("source", [NGram(), Recycling()])
def test_a_short_sequence_that_nobody_has_looked_at_is_judged_behind_its_prompt(
    source: ModelFree,
) -> None:
    """It came and went on while nobody looked, and is shorter than what is judged."""
    judged = source.judge(sequence([1, 2, 1], 2, 1), 4, 8)
    assert sum(right + 1 for _, right in judged) in (2, 3)
