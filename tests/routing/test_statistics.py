"""Counters of routing decisions against plain counting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import LOADED_FOR, PHASES, Phase, Routing, RoutingStatistics
from tests.launches import Launches

TOKENS = st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=4)
STEPS = st.lists(
    st.dictionaries(st.sampled_from(PHASES), TOKENS, min_size=1), min_size=1, max_size=5
)


def route(ids: list[list[int]]) -> Routing:
    expert_ids = torch.tensor(ids)
    return Routing(expert_ids, (expert_ids >= 0).float())


def test_totals_over_steps_and_layers() -> None:
    statistics = RoutingStatistics([4, 2])
    statistics.record(0, {"prefill": route([[0, 1], [0, -1]])})
    statistics.record(0, {"decode": route([[3, 0]])})
    statistics.record(1, {"prefill": route([[1], [1], [1]])})
    assert statistics.tokens_per_expert(0).tolist() == [3, 1, 0, 1]
    assert statistics.expert_loads(0) == 2 + 2
    first, second = statistics.snapshot()
    assert (first["steps"], first["tokens"]) == (2, 3)
    assert first["distinct_experts_per_step"] == 2.0
    assert second["tokens_per_expert"] == [0, 3]
    assert second["max_violation"] == 1.0


def test_more_steps_than_wait_to_be_counted() -> None:
    statistics = RoutingStatistics([4])
    for index in range(300):
        both = {"prefill": route([[0, 1]]), "decode": route([[1, 2], [2, -1]])}
        steps: list[dict[Phase, Routing]] = [{"decode": route([[3, -1]])}, both]  # type: ignore[list-item]
        statistics.record(0, steps[index % 2])
    assert statistics.tokens_per_expert(0).tolist() == [150, 300, 300, 150]
    assert statistics.expert_loads_by(0) == dict.fromkeys(LOADED_FOR, 0) | {
        "prefill": 150, "decode": 300, "both": 150,
    }  # fmt: skip


@given(st.lists(st.lists(TOKENS, min_size=2, max_size=2), min_size=1, max_size=4))
def test_layers_at_once_are_layers_one_by_one(steps: list[list[list[list[int]]]]) -> None:
    together, apart = RoutingStatistics([5, 5, 5]), RoutingStatistics([5, 5, 5])
    for first, second in steps:
        count = min(len(first), len(second))
        routings = route(first[:count]), route(second[:count])
        ids = torch.stack([routing.expert_ids for routing in routings])
        together.record_layers(1, "decode", ids)
        for layer, routing in enumerate(routings, 1):
            apart.record(layer, {"decode": routing})
    assert together.snapshot() == apart.snapshot()
    assert together.steps == [0, len(steps), len(steps)]


@given(st.lists(st.lists(STEPS, min_size=3, max_size=3), min_size=1, max_size=3))
def test_a_pass_counts_as_its_layers_apart(passes: list[list[list[dict[Phase, Any]]]]) -> None:
    """Steps that wait together, whatever layers follow each other, and steps counted at once."""
    waiting, at_once = RoutingStatistics([5, 5, 5]), RoutingStatistics([5, 5, 5])
    for layers in passes:
        for layer, steps in enumerate(layers):
            for step in steps:
                routings = {phase: route(ids) for phase, ids in step.items()}
                for statistics in (waiting, at_once):
                    statistics.record(layer, routings)
                at_once.tokens_of_all()
    assert waiting.snapshot() == at_once.snapshot()
    for layer in range(3):
        assert waiting.expert_loads_by(layer) == at_once.expert_loads_by(layer)


def test_a_pass_of_many_layers_is_counted_by_few_operations() -> None:
    """As many as a pass of one layer, but one that joins them."""
    operations = []
    for layers in (1, 30):
        statistics, launches = RoutingStatistics([9] * layers), Launches()
        for layer in range(layers):
            statistics.record(layer, {"prefill": route([[0, 1], [2, 8]])})
        with launches:
            statistics.tokens_of_all()
        operations.append(launches.names)
    assert len(operations[1]) == len(operations[0]) + 1


def test_counting_in_and_out_of_inference_mode() -> None:
    statistics = RoutingStatistics([2])
    for _ in range(2):
        with torch.inference_mode():
            statistics.record(0, {"prefill": route([[0, 1]])})
            assert statistics.tokens_per_expert(0).sum() > 0
        statistics.record(0, {"decode": route([[0, 1]])})
        assert statistics.expert_loads(0) % 4 == 0
    assert statistics.tokens_per_expert(0).tolist() == [4, 4]


def test_reset_forgets_everything() -> None:
    statistics = RoutingStatistics([2])
    statistics.record(0, {"decode": route([[0, 1]])})
    statistics.reset()
    assert statistics.expert_loads(0) == 0
    assert statistics.snapshot()[0]["max_violation"] == 0.0


@given(STEPS)
def test_every_load_has_one_reader(steps: list[dict[Phase, list[list[int]]]]) -> None:
    """Against sets: experts of one phase only, and of several in one step."""
    statistics = RoutingStatistics([5])
    expected, tokens = dict.fromkeys(LOADED_FOR, 0), dict.fromkeys(PHASES, 0)
    for step in steps:
        statistics.record(0, {phase: route(ids) for phase, ids in step.items()})
        readers = Counter[int]()
        visited = {
            phase: {expert for ids in rows for expert in ids} - {-1} for phase, rows in step.items()
        }
        for experts in visited.values():
            readers.update(experts)
        for phase, experts in visited.items():
            expected[phase] += sum(readers[expert] == 1 for expert in experts)
        expected["both"] += sum(count > 1 for count in readers.values())
        for phase, ids in step.items():
            tokens[phase] += len(ids)
    (layer,) = statistics.snapshot()
    assert layer["expert_loads_by"] == expected
    assert layer["expert_loads"] == sum(expected.values())
    assert layer["tokens_by"] == tokens
    assert layer["tokens"] == sum(tokens.values())
