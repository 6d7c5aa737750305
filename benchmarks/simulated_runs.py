"""What the simulator says of runs of `benchmarks.expert_parallel`, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.published import drawn
from benchmarks.simulator import lanes_of, simulate
from benchmarks.simulator_costs import Costs, Network
from experts.placement import eplb
from moe.link_speed import measure_link
from moe.rank_forecast import EXCHANGES


def against(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured tokens a second of runs with several ranks."""
    model, batch = result["model"], result["job"]["batch"]
    measured = {p["name"]: p for p in result["points"] if "error" not in p}
    layers, experts, each = model["layers"], model["experts"], model["expert_bytes"]
    trunk = result["weight_bytes"] - layers * experts * each
    ids = [drawn(batch, experts, model["top_k"], 0.0, seed) for seed in range(layers)]
    distinct = sum(len(np.unique(one)) for one in ids)
    rate = (trunk + distinct * each) * measured["1 rank"]["tokens_per_s"] / batch
    link, found = measure_link(), []
    network = Network(64, link.bytes_per_s, link.bytes_per_s, link.seconds * EXCHANGES / 2)
    for name, point in measured.items():
        ranks, summed = point["ranks"], name.endswith("summed")
        if ranks == 1 or name not in (f"{ranks} ranks", f"{ranks} ranks, summed"):
            continue
        slots = -(-experts * 5 // 4 // ranks) * ranks
        placements = [eplb(np.ones(experts), slots, ranks)] * layers
        row = 4.0 * model["hidden"]
        own = rate / ranks
        costs = Costs(trunk / layers / own, 0.0, each / own, 0.0, row, row, back_slots=not summed)
        step = simulate(lanes_of(ids, placements, 1), layers, costs, network)
        predicted = batch / step.seconds
        found.append(
            {"name": name, "predicted": predicted, "measured": point["tokens_per_s"]}
            | {"error": predicted / point["tokens_per_s"] - 1}
            | {"predicted_kb": step.bytes_a_token / 1e3}
            | {"measured_kb": (point["bytes_out_a_token"] + point["bytes_back_a_token"]) / 1e3}
        )
    return found
