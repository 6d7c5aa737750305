"""How far tokens determine experts, on traces where the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe.calibration.trace import Trace
from moe.commands.trace import findings as tokens

WORDS, EXPERTS, LENGTH = 40, 16, 200
RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, WORDS, 20 * LENGTH)
OWN = np.sort(np.stack([RNG.permutation(EXPERTS)[:2] for _ in range(WORDS)]), 1)


def test_a_token_that_decides_explains_all_that_one_slot_leaves_open() -> None:
    one = OWN[TEXT][:, :1]
    assert tokens.explained(TEXT, one) == pytest.approx(1, abs=0.05)
    assert tokens.agreement(TEXT, one) == 1


def test_a_token_that_says_nothing_explains_nothing() -> None:
    ids = np.sort(RNG.random((len(TEXT), EXPERTS)).argsort(1)[:, :2], 1)
    assert tokens.explained(TEXT, ids) < 0.01
    by_chance = tokens.chance_agreement(ids)
    assert by_chance == pytest.approx(2 / EXPERTS, abs=0.02)
    assert tokens.agreement(TEXT, ids) == pytest.approx(by_chance, abs=0.03)


def test_one_expert_leaves_nothing_to_explain() -> None:
    assert tokens.explained(TEXT, np.zeros((len(TEXT), 1), np.int64)) == 0


def test_no_key_comes_twice() -> None:
    assert math.isnan(tokens.agreement(np.array([1, 2, 3, -1, -1]), OWN[:5]))


def trace_of(ids: np.ndarray) -> Trace:
    return Trace(
        torch.from_numpy(TEXT).int(), [LENGTH] * 20, [EXPERTS],
        [torch.from_numpy(ids).to(torch.int16)], [torch.ones(ids.shape, dtype=torch.float16)],
    )  # fmt: skip


def test_tables_name_what_they_can_know() -> None:
    recall = tokens.table_recall(trace_of(OWN[TEXT]), WORDS)
    assert recall["token"] == [1.0]
    assert recall["popular"][0] < 0.5
    before = np.concatenate([[0], TEXT[:-1]])
    pairs = np.sort(np.stack([OWN[TEXT][:, 0], (OWN[before][:, 0] + 1) % EXPERTS], 1), 1)
    recall = tokens.table_recall(trace_of(pairs), WORDS)
    assert recall["pair"][0] > recall["token"][0] > recall["popular"][0]


def test_one_sequence_cannot_be_halved() -> None:
    whole = trace_of(OWN[TEXT])
    one = Trace(whole.token_ids, [len(TEXT)], [EXPERTS], whole.expert_ids, whole.weights)
    assert tokens.table_recall(one, WORDS) == {}


def test_weight_ratios() -> None:
    two = torch.tensor([[0.5, 0.1], [0.2, 0.8], [0.4, 0.2], [0.0, 0.0]])
    ratios = tokens.weight_ratios([two, two[:, :1]])
    assert ratios[0] == pytest.approx(0.25)
    assert math.isnan(ratios[1])
