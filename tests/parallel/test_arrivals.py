"""Prompts that wait count in the forecast of loads, by what a calibration expects of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from moe import MoE, SamplingParams
from moe.engine.wave import Group
from moe.parallel.arrivals import MOST, Arrivals, arrivals_of
from routing.predict.base import Floats

EXPERTS = [4, 2]


def visits(token_ids: Sequence[int]) -> Floats:
    """Prompts of token n visit expert n of the first layer, and all of the second."""
    return np.array([*np.eye(4, dtype=np.float32)[token_ids[0]], 1.0, 1.0], np.float32)


@pytest.fixture
def group(tiny_moe: Callable[[str], MoE]) -> Callable[[int, int], Group]:
    model = tiny_moe("qwen3_moe")
    return lambda token, size: model.request([token] * size, SamplingParams(max_new_tokens=1))


def test_tokens_of_prompts_go_to_the_experts_that_they_are_expected_at(
    group: Callable[[int, int], Group],
) -> None:
    arrivals = Arrivals(visits, EXPERTS)
    assert arrivals.of_layer(0) is None
    first, second = group(3, 10), group(1, 5)
    first.num_read = 4
    arrivals.waiting = [first, second]
    found = [arrivals.of_layer(layer) for layer in range(2)]
    assert [loads.tolist() for loads in found if loads is not None] == [[0, 5, 0, 6], [11, 11]]


def test_a_long_queue_is_looked_at_from_its_front(group: Callable[[int, int], Group]) -> None:
    arrivals = Arrivals(visits, EXPERTS)
    queue = [group(0, 1) for _ in range(MOST)] + [group(2, 9)]
    for turn, waiting in enumerate(queue):
        waiting.sequences[0].turn = (turn, 0)
    arrivals.waiting = queue
    loads = arrivals.of_layer(0)
    assert loads is not None
    assert loads.tolist() == [MOST, 0, 0, 0]


def test_without_a_calibration_nothing_is_expected(tmp_path: Path) -> None:
    assert arrivals_of(tmp_path, None, EXPERTS) is None  # type: ignore[arg-type]
