"""Set duelling against a brute force, and on units that are many."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.policies.duel import DOUBT, FOLLOWED, MEMORY, REST, TRIAL, Duel


@given(units=st.integers(2, 30), slots=st.integers(1, 20), seed=st.integers(0, 99))
def test_the_advantage_is_the_difference_of_hits_of_two_caches(
    units: int, slots: int, seed: int
) -> None:
    draw = random.Random(seed)
    duel, advantage = Duel(units, lambda: slots, math.inf), 0.0
    there = set[int](), set[int]()
    for visit in range(1, 60):
        asked = sorted(draw.sample(range(units), draw.randint(1, min(4, units))))
        hits = [len(own & set(asked)) for own in there]
        keep = min(MEMORY, 1 - 1 / (visit + DOUBT))
        advantage = keep * advantage + (1 - keep) * (hits[0] - hits[1])
        duel.visit(asked)
        worths = [draw.sample(range(units), units) for _ in there]
        for own, worth in zip(there, worths, strict=True):
            own.update(asked)
            surplus = max(0, len(own) - slots)
            for unit in sorted(own, key=worth.__getitem__)[:surplus]:
                own.remove(unit)
        believed = duel.settle(*(np.array(worth, float) for worth in worths))
        np.testing.assert_allclose(duel.advantage, advantage, rtol=1e-9, atol=1e-12)
        assert believed == (advantage >= 0) or abs(advantage) < 1e-12


def test_who_keeps_what_comes_back_is_believed_also_of_many_units() -> None:
    for units in (64, 5 * FOLLOWED):
        favourites = np.arange(units) % 4 == 0
        good, bad = favourites.astype(float), 1.0 - favourites
        draw = random.Random(0)
        for challenger, default, right in ((good, bad, True), (bad, good, False)):
            duel = Duel(units, partial(int, units / 4), math.inf)
            for _ in range(600):
                liked = {4 * unit for unit in draw.sample(range(units // 4), 6)}
                duel.visit(sorted(liked | set(draw.sample(range(units), 4))))
                believed = duel.settle(challenger, default)
            assert believed == right, (units, duel.advantage)


@pytest.mark.parametrize("load_seconds", [1.0, 0.001])
def test_a_challenger_rests_while_it_costs_more_than_it_saves(load_seconds: float) -> None:
    """It hits about two units more a visit, for half a second each time."""
    liked = np.arange(64) % 4 == 0
    duel, draw, rested = Duel(64, lambda: 16, load_seconds), random.Random(0), []
    for _ in range(2 * TRIAL + REST + 10):
        duel.visit(sorted({4 * draw.randrange(16) for _ in range(6)} | {draw.randrange(64)}))
        rested.append(duel.rests)
        if not duel.rests:
            duel.settle(liked.astype(np.float64), (~liked).astype(np.float64))
            duel.pay(0.5)
    assert sum(rested) == (0 if load_seconds == 1 else REST - 1 + 10)
    assert rested[TRIAL:].count(False) >= TRIAL  # it is tried again


def test_a_sample_tells_of_all_units() -> None:
    """The challenger keeps a quarter of the units, the default a third of the others; every second
    visit asks for the one or the other kind: (8 - 8 / 3) / 2 hits more."""
    units, draw = 5 * FOLLOWED, random.Random(0)
    liked = np.arange(units) < units // 4
    duel = Duel(units, partial(int, units / 4), math.inf)
    advantages = []
    for _ in range(4000):
        duel.visit(sorted(draw.sample(range(units // 4), 8)))
        duel.visit(sorted(draw.sample(range(units // 4, units), 8)))
        duel.settle(liked.astype(np.float64), (~liked).astype(np.float64))
        advantages.append(duel.advantage)
    assert sum(advantages[2000:]) / 2000 == pytest.approx(2.67, abs=0.4)
