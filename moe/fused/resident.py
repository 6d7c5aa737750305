"""Experts that a step runs by itself, while nobody else is concerned.

At the layers there is then nothing to decide: every expert is in memory, no policy changes a
routing, no other rank or lane is met, and the kernels leave Python out. What was routed is counted
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels import experts_forward
from kernels.reference import AnyExperts
from moe.fused.reference import Visitor, visitor
from moe.kv import Work
from moe.lanes import alone_with
from moe.moe_layer import MoELayers
from offload.experts import OffloadedExperts
from routing import Phase, Routing


class Resident:
    """The experts of a model, as a step sees them that runs them by itself.

    Attributes:
        why_not: what forbids that a step runs them by itself at any time; empty if nothing does.

    Args:
        experts: the model's MoE layers.
        takes: whether the step can run a layer's experts without Python.
    """

    def __init__(self, experts: MoELayers, takes: Callable[[AnyExperts], bool]) -> None:
        self._experts, self._layers, self._runner = experts, list(experts.layers), experts.run
        self.why_not = ""
        held = [layer for layer in experts.layers if not isinstance(layer, OffloadedExperts)]
        if len(held) < len(experts.layers):
            self.why_not = "not all of them are in memory"
        elif experts.forward is not experts_forward or not all(map(takes, held)):
            self.why_not = "their kernel needs Python"

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
        if experts.layers != self._layers or experts.forward is not experts_forward:
            return None  # not what the step has been made with
        return alone_with(self._runner)

    def count(self, routings: Sequence[Routing], phase: Phase) -> None:
        """Statistics of a step that has run the experts of every layer by itself."""
        for layer, routing in enumerate(routings):
            self._experts.statistics.record(layer, {phase: routing})


class Step(Protocol):
    """A fused step that can do both."""

    def __call__(self, work: Sequence[Work], visit: Visitor) -> list[Tensor]:
        """Logits as of `moe.trunk.Trunk.lanes`; ``visit`` runs the experts."""

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, and of each MoE layer what was visited: nobody is asked to run experts."""


@dataclass(frozen=True)
class ResidentStep:
    """Runs experts within the step while nobody else is concerned."""

    step: Step
    resident: Resident
    experts: MoELayers

    def __call__(self, work: Sequence[Work]) -> list[Tensor]:
        phase = self.resident.phase()
        if phase is None:
            return self.step(work, visitor(self.experts.run))
        logits, visited = self.step.alone(work)
        self.resident.count(visited, phase)
        return logits

    @property
    def where(self) -> str:
        """Whether experts are run within the step, and why not, for people."""
        why_not = self.resident.why_not
        return f"experts outside: {why_not}" if why_not else "experts inside"
