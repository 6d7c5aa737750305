"""Compiled learning against numpy, on routings with transitions and on routings without."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import choose_kernel
from offload.policies.learned import HEADS, LearnedCall, new_learner
from tests.oracles.learner import ReferenceLearner


def habitual(tokens: int, layers: int, width: int, noise: float, seed: int) -> list[LearnedCall]:
    """Calls, some of which follow from the token before; some layers are left out."""
    draw, calls, state, number = random.Random(seed), list[LearnedCall](), 0, 0
    for _ in range(tokens):
        state = draw.randrange(width) if draw.random() < noise else (3 * state + 1) % width
        for layer in range(layers):
            number += 1
            experts = {(state + step * layer) % width for step in range(draw.randint(1, 3))}
            ahead = [draw.randint(1, layers) + head * layers for head in range(HEADS)]
            if draw.random() < 0.9:
                calls.append((number, ahead, [layer * width + e for e in sorted(experts)]))
    return calls


@given(
    layers=st.integers(1, 8),
    width=st.integers(1, 40),
    transitions=st.booleans(),
    noise=st.sampled_from([0.0, 0.2, 1.0]),
    together=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_compiled_learning_equals_the_reference(
    layers: int, width: int, transitions: bool, noise: float, together: int, seed: int
) -> None:
    if choose_kernel()[0] is None:
        pytest.skip("no compiler")
    compiled = new_learner(layers, width, transitions=transitions)
    reference = ReferenceLearner(layers, width, transitions=transitions)
    calls = habitual(24, layers, width, noise, seed)
    np.testing.assert_allclose(compiled.learn([], 0), reference.learn([], 0), rtol=1e-12)
    for start in range(0, len(calls), together):
        news = calls[start : start + together]
        layer = news[-1][2][0] // width
        found, expected = compiled.learn(news, layer), reference.learn(news, layer)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        np.testing.assert_allclose(compiled.tails, reference.tails, rtol=1e-12)


def test_transitions_are_learnt() -> None:
    """What follows from the token before is worth more than by rates alone, and in both ways."""
    calls = habitual(200, 4, 16, 0.0, 0)
    for make in (new_learner, ReferenceLearner):
        worth = {}
        for transitions in (True, False):
            learner, worth[transitions] = make(4, 16, transitions=transitions), 0.0
            for call in calls:
                layer, units = call[2][0] // 16, call[2]
                worth[transitions] += float(learner.learn([], layer)[units].mean())
                learner.learn([call], layer)
        assert worth[True] > 1.2 * worth[False]
