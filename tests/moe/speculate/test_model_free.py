"""Drafts without a model: what they say, and that they learn from what became of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.model_free import LONGEST, SHORTEST, History, NGram, Recycling

VOCABULARY = 8


class FakeSequence:
    def __init__(self, prompt: list[int], new: list[int]) -> None:
        self.prompt_token_ids, self.token_ids = prompt, new


def sequence(prompt: list[int], *new: int) -> Any:
    return cast(RunningSequence, FakeSequence(prompt, list(new)))


def oracle(tokens: list[int], limit: int) -> tuple[list[int], int]:
    """By looking at every place."""
    for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                found = tokens[end:]
                return (found * limit)[:limit], size
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9), st.data())
def test_history_finds_what_looking_everywhere_finds(
    tokens: list[int], limit: int, data: st.DataObject
) -> None:
    history, place = History(), 0
    while place < len(tokens):
        step = data.draw(st.integers(1, 7))
        history.extend(tokens[place : place + step])
        place += step
    assert history.following(limit) == oracle(tokens, limit)


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
    source, one = Recycling(VOCABULARY), sequence([], 1)
    assert source.offer(one, 3) is PLAIN
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 2] = logits[1, 5] = logits[2, 1] = 9.0
    source.learn(one, Draft.sure(source.mode, [2, 5], [1.0, 1.0]), 0, logits)
    assert source.offer(one, 4).tokens == (2, 5, 1, 2)
    assert source.offer(one, 4).confidence[0] == pytest.approx(float(logits[0].softmax(0)[2]))
    source.learn(one, PLAIN, 0, logits[1:2])
    assert source.offer(one, 1).tokens == (5,)
