"""Where experts are and what went to them, as one draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experts.manifest import read_manifest
from experts.placement import Placement
from moe import MoE, SamplingParams
from moe.expert_map import expert_activity, expert_layout
from moe.loading.memory_plan import GIB
from offload.capacity import slot_bytes
from routing import Routing
from routing.statistics import RoutingStatistics

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
}
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
PROMPT = list(range(3, 40))


def with_room(store: Path, slots: int) -> MoE:
    near = MoE.from_pretrained(store, SMALL)
    rest = sum(line.bytes for line in near.memory_plan.lines if line.name != "experts")
    manifest = read_manifest(store)
    room = rest + slots * slot_bytes(manifest, manifest.bits) + 16
    memory = SMALL["memory"] | {"device_gib": room / GIB}
    return MoE.from_pretrained(store, SMALL | {"memory": memory})


def test_experts_in_memory_and_the_tokens_that_they_got(store: Path) -> None:
    model = MoE.from_pretrained(store, SMALL)
    model.generate(PROMPT, GREEDY)
    layout, now = model.expert_layout(), json.loads(json.dumps(model.expert_activity()))
    whole = str(layout["places"].index("memory"))
    for about, layer, counted in zip(
        layout["layers"], now["layers"], model.stats()["layers"], strict=True
    ):
        assert about == {"bits": [8] * counted["num_experts"], "ranks": None}
        assert layer["where"] == whole * counted["num_experts"]
        assert layer["tokens"] == counted["tokens_per_expert"]
        assert sum(layer["tokens"]) > 0
    assert (now["cache"], now["drafts"], now["ranks"]) == (None, None, None)


def test_experts_on_disk_with_bits_of_their_own(mixed_store: Path) -> None:
    model = with_room(mixed_store, 6)
    before = model.expert_activity()
    model.generate(PROMPT, GREEDY)
    layout, now = model.expert_layout(), model.expert_activity()
    assert [tuple(layer["bits"]) for layer in layout["layers"]] == [
        record.bits for record in read_manifest(mixed_store).layers
    ]
    assert {digit for layer in before["layers"] for digit in layer["where"]} == {"0"}
    cache = model.experts.layers[0].cache  # type: ignore[union-attr]
    for index, layer in enumerate(now["layers"]):
        names = [layout["places"][int(digit)] for digit in layer["where"]]
        there = cache.resident(index).tolist()
        assert [name == "memory" for name in names] == there
        assert set(names) <= {"memory", "disk"}
    stats = model.stats()["offload"]
    for name in ("hits", "misses", "evictions", "slots"):
        assert now["cache"][name] == stats[name]
    assert now["cache"]["disk_bytes"] == stats["bytes_read"] > 0


class HalfHeld:
    """Stands for `Offloaded` with a cache that has the first expert, and the second on its way."""

    bits = ((4, 4, 4, 4),)

    def places(self) -> Any:
        return np.array([[4, 1, 0, 0]], np.uint8)


def test_copies_on_ranks() -> None:
    statistics = RoutingStatistics([4])
    ids = torch.tensor([[0, 3], [0, -1]])
    statistics.record(0, {"decode": Routing(ids, torch.ones(2, 2))})
    placement = Placement((0, 1, 2, 3, 0, 3), 4, 2)  # rank 0: 0, 1, 2; rank 1: 3, 0, 3
    offloaded: Any = HalfHeld()
    layers: Any = [object()]  # whose bits the cache knows
    (about,) = expert_layout(layers, offloaded, [placement])["layers"]
    assert about == {"bits": [4] * 4, "ranks": [[0, 1], [0], [0], [1]]}
    (layer,) = expert_activity(statistics, offloaded, [placement])
    assert layer == {"tokens": [2, 0, 0, 1], "where": "4105"}
    (near,) = expert_activity(statistics, None, [placement])
    assert near["where"] == "4445"


@pytest.mark.parametrize("counts", [[2, 5], [3]])
def test_layers_of_different_sizes(counts: list[int]) -> None:
    statistics = RoutingStatistics(counts)
    layers = expert_activity(statistics, None, [])
    assert [len(layer["tokens"]) for layer in layers] == counts
    assert [len(layer["where"]) for layer in layers] == counts
