"""Trust: chances of absent experts come near what then happens; doubt does not last for ever."""

from __future__ import annotations

import random

import pytest

from offload.trust import Trust


def told(trust: Trust, right: float, visits: int, stated: float = 0.8) -> float:
    """Mean chance of the last half of visits at each of which one absent expert is named."""
    draw, chances = random.Random(0), []
    for _ in range(visits):
        expert = draw.randrange(8)
        chances.append(trust.chance(0, expert, stated))
        trust.visit(0, [expert] if draw.random() < right else [(expert + 1) % 8])
    half = chances[visits // 2 :]
    return sum(half) / len(half)


@pytest.mark.parametrize("right", [0.2, 0.5, 0.9])
def test_chances_are_what_happens(right: float) -> None:
    assert told(Trust([8]), right, 600) == pytest.approx(right, abs=0.08)


def test_who_is_asked_for_often_is_believed_sooner() -> None:
    trust, draw = Trust([32]), random.Random(0)
    for _ in range(800):  # a guess at 0 or 1 is right, one at others is not
        expert = draw.choice((0, 1, *range(2, 32)))
        trust.chance(0, expert, 0.6)
        trust.visit(0, [expert] if expert < 2 else [draw.randrange(2)])
    assert trust.chance(0, 0, 0.6) > trust.chance(0, 20, 0.6) + 0.2


def test_a_predictor_that_was_wrong_for_long_is_believed_again() -> None:
    trust = Trust([8])
    assert told(trust, 0.0, 2000) < 0.2
    told(trust, 1.0, 60)
    assert told(trust, 1.0, 60) > 0.6


def test_what_was_said_of_a_layer_that_is_not_reached_teaches_nothing() -> None:
    trust = Trust([8, 8])
    before = trust.chance(1, 3, 0.7)
    trust.forget()
    for _ in range(50):
        trust.visit(1, [])
    assert trust.chance(1, 3, 0.7) == pytest.approx(before, abs=0.01)
