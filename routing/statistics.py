"""What the routers decided, counted per layer: the numbers behind balance, caching and prediction.

Counting is one `bincount` a layer and step and no host synchronisation: totals stay on the device
of the routing until someone asks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routing.routing import Routing


class RoutingStatistics:
    """Running totals of one model.

    A *step* of a layer is one run of its experts, whatever number of lanes met there. Distinct
    experts a step is the number that costs bytes (ALGORITHMS.md 0.3: unique experts per forward).
    """

    def __init__(self, experts_per_layer: list[int]) -> None:
        self.num_experts = experts_per_layer
        self.reset()

    def reset(self) -> None:
        self.steps = [0] * len(self.num_experts)
        self.tokens = [0] * len(self.num_experts)
        self._tokens_per_expert = [torch.zeros(e, dtype=torch.int64) for e in self.num_experts]
        self._distinct = [torch.zeros((), dtype=torch.int64) for _ in self.num_experts]

    def record(self, layer: int, routing: Routing) -> None:
        counts = routing.tokens_per_expert(self.num_experts[layer])
        self.steps[layer] += 1
        self.tokens[layer] += routing.num_tokens
        self._tokens_per_expert[layer] = self._tokens_per_expert[layer].to(counts.device) + counts
        self._distinct[layer] = self._distinct[layer].to(counts.device) + (counts > 0).sum()

    def tokens_per_expert(self, layer: int) -> Tensor:
        """``(E,)`` int64 on the CPU: tokens that visited each expert of the layer so far."""
        return self._tokens_per_expert[layer].cpu().clone()

    def expert_loads(self, layer: int) -> int:
        """Distinct experts summed over the layer's steps: how often an expert had to be read."""
        return int(self._distinct[layer])

    def max_violation(self, layer: int) -> float:
        """MaxVio of arXiv 2408.15664: heaviest expert's load over the mean load, minus 1."""
        counts = self.tokens_per_expert(layer).double()
        return float(counts.max() / counts.mean() - 1) if bool(counts.sum()) else 0.0

    def snapshot(self) -> list[dict[str, Any]]:
        """One plain dictionary a layer, ready for JSON."""
        return [
            {
                "layer": layer,
                "num_experts": self.num_experts[layer],
                "steps": self.steps[layer],
                "tokens": self.tokens[layer],
                "tokens_per_expert": self.tokens_per_expert(layer).tolist(),
                "expert_loads": self.expert_loads(layer),
                "distinct_experts_per_step": self.expert_loads(layer) / max(self.steps[layer], 1),
                "max_violation": self.max_violation(layer),
            }
            for layer in range(len(self.num_experts))
        ]
