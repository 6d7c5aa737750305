"""Batches whose experts overlap: cheaper where they can be, and nobody starves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe.engine.expert_aware_order import choose_batch, expected_units


def needs_of(groups: list[int], units: int = 8) -> np.ndarray:
    """Sequences of a group need the same two units."""
    needs = np.zeros((len(groups), units), np.float32)
    for row, group in enumerate(groups):
        needs[row, [2 * group, 2 * group + 1]] = 1
    return needs


def test_sequences_with_the_same_experts_run_together() -> None:
    needs = needs_of([0, 1, 2, 0, 1, 0])
    assert choose_batch(needs, 3, [0] * 6, 4) == [0, 3, 5]
    assert choose_batch(needs, 4, [0] * 6, 4) == [0, 3, 5, 1], "then in the order of the queue"
    running = needs_of([2])[0]
    assert choose_batch(needs, 2, [0] * 6, 4, running) == [2, 0], "nothing new is read for it"


def test_who_has_waited_goes_first() -> None:
    needs = needs_of([0, 1, 2, 0])
    assert choose_batch(needs, 2, [0, 0, 4, 0], 4) == [2, 0]
    assert choose_batch(needs, 2, [0, 0, 3, 0], 4) == [0, 3]
    assert choose_batch(needs, 0, [0] * 4, 4) == []
    assert choose_batch(needs[:0], 3, [], 4) == []


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4))
def test_nobody_is_passed_over_more_often_than_patience_allows(
    seed: int, room: int, patience: int, arrivals: int
) -> None:
    generator = np.random.default_rng(seed)
    queue: list[tuple[int, np.ndarray]] = []
    passed: dict[int, int] = {}
    arrived = 0
    for _ in range(40):
        for _ in range(arrivals):
            queue.append((arrived, generator.random(6).astype(np.float32) ** 4))
            arrived += 1
        needs = np.stack([need for _, need in queue])
        chosen = choose_batch(needs, room, [passed.get(name, 0) for name, _ in queue], patience)
        assert len(set(chosen)) == len(chosen) == min(room, len(queue))
        last = max(chosen)
        for index, (name, _) in enumerate(queue[:last]):
            if index not in chosen:
                passed[name] = passed.get(name, 0) + 1
        assert max(passed.values(), default=0) <= patience
        queue = [entry for index, entry in enumerate(queue) if index not in chosen]


@given(st.integers(0, 1 << 30))
def test_the_chosen_batch_expects_no_more_units_than_the_first_in_line(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 4, 24).tolist()
    needs = needs_of(groups)
    chosen = choose_batch(needs, 6, [0] * 24, 9)
    assert expected_units(needs[chosen]) <= expected_units(needs[:6])
