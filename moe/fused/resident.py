"""Experts that a recorded step runs by itself, while nobody else is concerned.

At the layers there is then nothing to decide: every expert is in memory, no policy changes a
routing, no other rank or lane is met, and the kernels leave the host out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels import experts_forward, reads_nothing_back
from moe.lanes import alone_with
from moe.moe_layer import MoELayers
from offload.experts import OffloadedExperts
from routing import Phase, Routing


class Resident:
    """The experts of a model, as a recorded step sees them.

    Attributes:
        why_not: what forbids that a step runs them by itself at any time; empty if nothing does.

    Args:
        experts: the model's MoE layers.
        rows: ``(1, H)`` like those that experts get.
    """

    def __init__(self, experts: MoELayers, rows: Tensor) -> None:
        self._experts = experts
        self.why_not = ""
        if any(isinstance(layer, OffloadedExperts) for layer in experts.layers):
            self.why_not = "not all of them are in memory"
        elif experts.forward is not experts_forward or not all(
            reads_nothing_back(rows, layer)
            for layer in experts.layers
            if not isinstance(layer, OffloadedExperts)
        ):
            self.why_not = "their kernel needs the host"

    def run(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        """``(B, H)``: each row's weighted sum of its experts."""
        own = self._experts.layers[layer]
        assert not isinstance(own, OffloadedExperts)
        return self._experts.forward(rows, routing.expert_ids, routing.weights, own)

    def phase(self) -> Phase | None:
        """What the running lane reads for, if it can do without the host; None if it cannot."""
        experts = self._experts
        changed = experts.policies.policies or experts.weaken is not None
        if self.why_not or changed or not experts.dispatcher.local:
            return None
        return alone_with(experts.run)

    def count(self, routings: Sequence[Routing], phase: Phase) -> None:
        """Statistics of a step that has run the experts of every layer by itself."""
        for layer, routing in enumerate(routings):
            self._experts.statistics.record(layer, {phase: routing})
