"""The MoE layers of a model: policies, experts and combination for what the lanes brought."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import ExpertWeights, experts_forward
from moe.lanes import Visit
from routing import PolicyChain, Routing, RoutingContext, RoutingStatistics


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Args:
        layers: experts of each MoE layer.
        policies: applied to the joint routing of a layer before its experts run.
    """

    def __init__(self, layers: Sequence[ExpertWeights], policies: PolicyChain) -> None:
        self.layers = list(layers)
        self.policies = policies
        self.statistics = RoutingStatistics([layer.num_experts for layer in layers])

    def run(self, layer: int, visits: Sequence[Visit]) -> list[Tensor]:
        """Rows ``(T_i, H)`` of each visit, in its own dtype."""
        experts = self.layers[layer]
        routing = Routing.concat([visit.routing for visit in visits])
        routing = self.policies(routing, RoutingContext(layer, experts.num_experts))
        self.statistics.record(layer, routing)
        hidden = [visit.hidden_states for visit in visits]
        rows = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        rows = experts_forward(rows, routing.expert_ids, routing.weights, experts)
        return list(rows.split([states.shape[0] for states in hidden]))

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.expert_bytes * layer.num_experts for layer in self.layers)

    @property
    def expert_bytes_read(self) -> int:
        """Expert bytes read since the statistics were reset: distinct experts of each step."""
        return sum(
            self.statistics.expert_loads(index) * layer.expert_bytes
            for index, layer in enumerate(self.layers)
        )
