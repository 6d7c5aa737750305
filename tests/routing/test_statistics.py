"""Counters of routing decisions against plain counting."""

from __future__ import annotations

import torch

from routing import Routing, RoutingStatistics


def route(ids: list[list[int]]) -> Routing:
    expert_ids = torch.tensor(ids)
    return Routing(expert_ids, (expert_ids >= 0).float())


def test_totals_over_steps_and_layers() -> None:
    statistics = RoutingStatistics([4, 2])
    statistics.record(0, route([[0, 1], [0, -1]]))
    statistics.record(0, route([[3, 0]]))
    statistics.record(1, route([[1], [1], [1]]))
    assert statistics.tokens_per_expert(0).tolist() == [3, 1, 0, 1]
    assert statistics.expert_loads(0) == 2 + 2
    first, second = statistics.snapshot()
    assert (first["steps"], first["tokens"]) == (2, 3)
    assert first["distinct_experts_per_step"] == 2.0
    assert second["tokens_per_expert"] == [0, 3]
    assert second["max_violation"] == 1.0


def test_reset_forgets_everything() -> None:
    statistics = RoutingStatistics([2])
    statistics.record(0, route([[0, 1]]))
    statistics.reset()
    assert statistics.expert_loads(0) == 0
    assert statistics.snapshot()[0]["max_violation"] == 0.0
