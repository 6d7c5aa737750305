"""What the simulator says of runs of `benchmarks.expert_parallel`, beside what was measured.

The rate at which weights are read is fitted to the run of one rank. What a rank computes to
exchange a layer's rows is measured by itself, in the way that each run goes
(`benchmarks.dispatch_cost`); what else a step of several ranks takes is fitted to the first of
them. Ranks that share a core compute in turn. Everything else is predicted: other numbers of ranks,
and results summed on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.dispatch_cost import drawn
from experts.placement import eplb, slots_for
from lab.simulation.costs import Costs, Network
from lab.simulation.simulator import Ints, Simulated, lanes_of, simulate

LOCAL = Network(64, float("inf"), float("inf"), 0.0)
"""Between ranks of one machine rows are moved by whoever computes, and counted there."""


@dataclass(frozen=True)
class Machine:
    """What runs share.

    Attributes:
        model: as `benchmarks.expert_parallel` describes it.
        rate: bytes a second of all ranks together.
        cores: that ranks share.
        ids: ``(B, K)`` expert ids of each layer.
    """

    model: Mapping[str, Any]
    rate: float
    cores: int
    ids: list[Ints]

    def crowded(self, ranks: int) -> float:
        """Ranks a core."""
        return max(1.0, ranks / self.cores)

    def step(self, ranks: int, dispatch_s: float, step_s: float, *, summed: bool) -> Simulated:
        """Of so many ranks.

        Args:
            dispatch_s: that a rank computes at a layer to exchange rows.
            step_s: that it computes beside its layers; both on a core of its own.
        """
        layers, experts = self.model["layers"], self.model["experts"]
        placements = [eplb(np.ones(experts), slots_for(experts, ranks, 0.25), ranks)] * layers
        row, own, crowded = 4.0 * self.model["hidden"], self.rate / ranks, self.crowded(ranks)
        costs = Costs(
            attention_s=self.model["trunk_bytes"] / layers / own + dispatch_s * crowded,
            attention_token_s=0.0,
            expert_s=self.model["expert_bytes"] / own,
            slot_s=0.0,
            out_bytes=row,
            back_bytes=row,
            back_slots=not summed,
            step_s=step_s * crowded,
        )
        return simulate(lanes_of(self.ids, placements, 1), layers, costs, LOCAL)


def against(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured tokens a second of runs with several ranks; the fitted one says so."""
    model, batch = result["model"], result["job"]["batch"]
    measured = {p["name"]: p for p in result["points"] if "error" not in p}
    layers, experts, each = model["layers"], model["experts"], model["expert_bytes"]
    ids = [drawn(batch, experts, model["top_k"], 0.0, seed) for seed in range(layers)]
    moved = model["trunk_bytes"] + sum(len(np.unique(one)) for one in ids) * each
    rate = moved * measured["1 rank"]["tokens_per_s"] / batch
    machine = Machine(model, rate, result["environment"]["cores"], ids)
    found: list[dict[str, Any]] = []
    step_s = 0.0
    for name, dispatch_s in result["dispatch_s"].items():
        if name not in measured:
            continue
        point, summed = measured[name], name.endswith("summed")
        ranks, seconds = point["ranks"], batch / point["tokens_per_s"]
        if not found:
            bare = machine.step(ranks, dispatch_s, 0.0, summed=summed).seconds
            step_s = (seconds - bare) / machine.crowded(ranks)
        step = machine.step(ranks, dispatch_s, step_s, summed=summed)
        found.append(
            {"name": name, "predicted": batch / step.seconds, "measured": point["tokens_per_s"]}
            | {"error": seconds / step.seconds - 1, "fitted": not found}
            | {"dispatch_ms": dispatch_s * 1e3, "step_ms": step_s * 1e3}
            | {"predicted_kb": step.bytes_a_token / 1e3}
            | {"measured_kb": (point["bytes_out_a_token"] + point["bytes_back_a_token"]) / 1e3}
        )
    return found
