"""Allocation: the integer program, dynamic programming and plain enumeration agree."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experts.compress.allocation import AllocationError, Choice, Damage, Sizes, allocate, taken

BITS = np.array([2, 3, 4, 8])


@st.composite
def instances(draw: st.DrawFn, most_experts: int) -> tuple[NDArray, NDArray, int]:
    """Damage in whole numbers, so that sums are exact; sizes of two kinds of expert; a budget."""
    count = draw(st.integers(1, most_experts))
    whole = st.lists(st.integers(0, 10**6), min_size=4, max_size=4)
    damage = draw(st.lists(whole, min_size=count, max_size=count))
    scale = draw(st.lists(st.sampled_from([64, 96]), min_size=count, max_size=count))
    sizes = np.array(scale)[:, None] * BITS + 16
    budget = draw(st.integers(int(sizes[:, 0].sum()), int(sizes[:, -1].sum())))
    return np.array(damage, dtype=float), sizes, budget


def by_table(damage_EW: Damage, sizes_EW: Sizes, budget: int) -> Choice:
    """The best choice by dynamic programming over bytes, in the largest unit there is."""
    least_E1 = sizes_EW.min(1, keepdims=True)
    unit = math.gcd(*np.unique(sizes_EW - least_E1).tolist()) or 1
    extra_EW, room = (sizes_EW - least_E1) // unit, (budget - int(least_E1.sum())) // unit
    least = np.zeros(room + 1)  # least damage of the experts so far within so many units
    chosen = np.zeros((len(damage_EW), room + 1), dtype=np.int8)
    for expert, (costs, extra) in enumerate(zip(damage_EW, extra_EW, strict=True)):
        ways = np.full((len(costs), room + 1), np.inf)
        for way, cost, units in zip(ways, costs, extra, strict=True):
            way[units:] = least[: max(room + 1 - units, 0)] + cost
        chosen[expert], least = ways.argmin(0), ways.min(0)
    choice = np.zeros(len(damage_EW), dtype=np.int64)
    for expert in reversed(range(len(damage_EW))):
        choice[expert] = chosen[expert, room]
        room -= int(extra_EW[expert, choice[expert]])
    return choice


@given(instances(5))
def test_both_find_what_enumeration_finds(instance: tuple[NDArray, NDArray, int]) -> None:
    damage, sizes, budget = instance
    choices = np.array(list(product(range(4), repeat=len(damage))))
    rows = np.arange(len(damage))
    fitting = choices[sizes[rows, choices].sum(1) <= budget]
    least = damage[rows, fitting].sum(1).min()
    for solve in (allocate, by_table):
        choice = solve(damage, sizes, budget)
        assert taken(sizes, choice).sum() <= budget
        assert taken(damage, choice).sum() == least


@given(instances(60))
def test_the_integer_program_and_the_table_agree(instance: tuple[NDArray, NDArray, int]) -> None:
    damage, sizes, budget = instance
    program, table = (solve(*instance) for solve in (allocate, by_table))
    assert taken(damage, program).sum() == taken(damage, table).sum()
    assert taken(sizes, table).sum() <= budget


def test_they_agree_on_48_layers_of_128_experts() -> None:
    generator = np.random.default_rng(0)
    damage = np.exp(generator.normal(0, 2, (48 * 128, 1)))
    damage = damage * [1, 0.25, 0.06, 2e-4] * np.exp(generator.normal(0, 0.3, (48 * 128, 4)))
    sizes = np.tile(BITS * 589_824 + 147_456, (48 * 128, 1))
    budget = int(sizes.sum() * 2.54 / 17)
    program, table = (solve(damage, sizes, budget) for solve in (allocate, by_table))
    assert taken(damage, program).sum() == pytest.approx(taken(damage, table).sum(), rel=1e-12)


def test_impossible_budgets_name_the_numbers() -> None:
    damage, sizes = np.ones((10, 3)), np.tile(BITS * 100, (10, 1))
    with pytest.raises(AllocationError, match=r"1,999 bytes, and the experts take 2,000 at their"):
        allocate(damage, sizes, 1_999)
    with pytest.raises(AllocationError, match=r"8,001 bytes, and the experts take 8,000 at their"):
        allocate(damage, sizes, 8_001)
    damage[3, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        allocate(damage, sizes, 4_000)
