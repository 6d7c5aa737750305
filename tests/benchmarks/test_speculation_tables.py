"""What the best in hindsight is worth: the largest of noisy rates is luck in part."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from benchmarks.speculation_contenders import Contender
from benchmarks.speculation_runs import Run
from benchmarks.speculation_tables import describe, of_best_apart


def contender(seconds: list[float]) -> Contender:
    return Contender("some", None, 1, [Run([], counted=10, seconds=each) for each in seconds])


@pytest.mark.parametrize("rounds", [2, 5, 8])
def test_who_is_as_fast_as_all_others_is_so_by_rounds_apart(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    hindsight, apart = list[float](), list[float | None]()
    for _ in range(400):
        auto, *fixed = (contender(rng.uniform(0.95, 1.05, rounds).tolist()) for _ in range(5))
        hindsight.append(auto.rate / max(each.rate for each in fixed))
        apart.append(of_best_apart(auto, fixed))
    assert fmean(hindsight) < 0.993
    assert fmean(each for each in apart if each is not None) == pytest.approx(1.0, abs=0.004)


def test_a_better_choice_is_found_and_one_round_says_nothing() -> None:
    slow, fast, auto = contender([2.0] * 4), contender([1.0] * 4), contender([1.25] * 4)
    assert of_best_apart(auto, [slow, fast]) == 0.8
    assert of_best_apart(contender([1.0]), [contender([1.0])]) is None


def test_a_stall_in_one_round_moves_the_speedup_but_not_its_median() -> None:
    plain, auto = contender([1.0, 1.0, 1.0]), contender([0.5, 0.5, 5.0])
    (point,) = describe([plain, auto], {"residency": 1.0})
    assert point["speedup"] == 0.5
    assert point["median_speedup"] == 2.0
