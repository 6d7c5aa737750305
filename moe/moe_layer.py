"""The MoE layers of a model: policies, experts and combination for what the lanes brought."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import Forward, experts_forward
from kernels.reference import AnyExperts
from moe.visit import Visit
from routing import (
    PHASES,
    READERS,
    Phase,
    PolicyChain,
    Reader,
    Routing,
    RoutingContext,
    RoutingStatistics,
)


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Args:
        layers: experts of each MoE layer.
        policies: applied to the joint routing of a layer before its experts run.
        forward: what runs a layer's experts.
    """

    def __init__(
        self,
        layers: Sequence[AnyExperts],
        policies: PolicyChain,
        forward: Forward = experts_forward,
    ) -> None:
        self.layers = list(layers)
        self.policies = policies
        self._forward = forward
        self.statistics = RoutingStatistics([layer.num_experts for layer in layers])

    def run(self, layer: int, visits: Sequence[Visit]) -> list[Tensor]:
        """Rows ``(T_i, H)`` of each visit, in its own dtype."""
        experts = self.layers[layer]
        routing = Routing.concat([visit.routing for visit in visits])
        routing = self.policies(routing, RoutingContext(layer, experts.num_experts))
        self.statistics.record(layer, _by_phase(routing, visits))
        if len(visits) == 1:
            rows = visits[0].hidden_states
            return [self._forward(rows, routing.expert_ids, routing.weights, experts)]
        hidden = [visit.hidden_states for visit in visits]
        rows = self._forward(torch.cat(hidden), routing.expert_ids, routing.weights, experts)
        return list(rows.split([states.shape[0] for states in hidden]))

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.expert_bytes * layer.num_experts for layer in self.layers)

    @property
    def expert_bytes_read_by(self) -> dict[Reader, int]:
        """Expert bytes read since the statistics were reset, by whose tokens needed the expert."""
        loads = [self.statistics.expert_loads_by(index) for index in range(len(self.layers))]
        return {
            reader: sum(
                by[reader] * layer.expert_bytes
                for by, layer in zip(loads, self.layers, strict=True)
            )
            for reader in READERS
        }


def _by_phase(routing: Routing, visits: Sequence[Visit]) -> dict[Phase, Routing]:
    """The joint routing of the visits, taken apart again by phase."""
    if len({visit.phase for visit in visits}) == 1:
        return {visits[0].phase: routing}
    parts = routing.split([visit.hidden_states.shape[0] for visit in visits])
    return {
        phase: Routing.concat(
            [part for visit, part in zip(visits, parts, strict=True) if visit.phase == phase]
        )
        for phase in PHASES
    }
