"""Experts that a step runs by itself, while nobody else is concerned, or all ranks do the same.

At the layers there is then nothing to decide: every expert is in memory, no policy changes a
routing, no other lane is met, and the kernels leave Python out. What was routed is counted
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from experts.dispatch import AllToAllDispatcher
from experts.dispatch.at_once import AtOnce
from kernels import experts_forward
from kernels.cpu import layer as native
from kernels.reference import AnyExperts
from moe.fused.reference import Visitor, visitor
from moe.kv import Work
from moe.lanes import alone_with
from moe.moe_layer import MoELayers
from moe.parallel.lockstep import Pass
from offload.experts import LayerExperts, OffloadedExperts, held_experts
from routing import Phase, Routing


class Inside(NamedTuple):
    """What runs a layer's experts within a step.

    Attributes:
        call: for C++.
        slots: ``(E + 1,)`` int64, live: where each expert is now, -1 for those that are not in
            memory; None where all are.
    """

    call: native.AtOnce
    slots: Tensor | None


class Resident:
    """The experts of a model, as a step sees them that runs them by itself.

    Attributes:
        why_not: what forbids that a step runs them by itself at any time; empty if nothing does.
        why_not_shared: the same, where other ranks have their part of them.

    Args:
        experts: the model's MoE layers.
        takes: whether the step can run a layer's experts without Python.
    """

    def __init__(self, experts: MoELayers, takes: Callable[[AnyExperts], bool]) -> None:
        self._experts, self._layers, self._runner = experts, list(experts.layers), experts.run
        self._cached = [one for one in experts.layers if isinstance(one, OffloadedExperts)]
        held, self.why_not_shared = map(held_experts, experts.layers), ""
        if experts.forward is not experts_forward or not all(map(takes, held)):
            self.why_not_shared = "their kernel needs Python"
        self.why_not = self.why_not_shared
        if self._cached:
            self.why_not = "not all of them are in memory"

    def run(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        """``(B, H)``: each row's weighted sum of its experts."""
        own = self._experts.layers[layer]
        assert not isinstance(own, OffloadedExperts)
        return self._experts.forward(rows, routing.expert_ids, routing.weights, own)

    def phase(self) -> Phase | None:
        """What the running lane reads for, if it can do without the host; None if it cannot."""
        experts = self._experts
        changed = experts.policies.policies or experts.weaken is not None
        why_not = self.why_not if experts.dispatcher.local else self.why_not_shared
        if why_not or changed:
            return None
        if experts.layers != self._layers or experts.forward is not experts_forward:
            return None  # not what the step has been made with
        return alone_with(self._runner)

    def count(self, routings: Sequence[Routing], phase: Phase) -> None:
        """Statistics of a step that has run the experts of every layer by itself."""
        for layer, routing in enumerate(routings):
            self._experts.statistics.record(layer, {phase: routing})

    def company(self, phase: Phase) -> Company | None:
        """The other ranks, where each may meet them at all layers of a pass without Python."""
        experts = self._experts
        way, everybody = experts.dispatcher, experts.everybody
        at_once = way.at_once if isinstance(way, AllToAllDispatcher) else None
        if at_once is None or everybody is None or everybody.left != len(self._layers):
            return None
        if not all(layer.plain for layer in self._cached):
            return None
        return Company(at_once, everybody, experts.layers, partial(self.count, phase=phase))


@dataclass(frozen=True)
class Company:
    """Ranks that share the experts, in a pass.

    Attributes:
        at_once: the way to them.
        everybody: the pass.
        layers: what this rank has of the experts.
        count: hears of what was routed.
    """

    at_once: AtOnce
    everybody: Pass
    layers: Sequence[LayerExperts]
    count: Callable[[Sequence[Routing]], None]

    def meeting(self, rows: int, hidden: int, slots: int) -> int | None:
        """As `AtOnce.walk`."""
        return self.at_once.walk(rows, hidden, slots)

    def run(self, act: Callable[[], int]) -> int:
        """Calls what meets them."""
        return self.at_once.run(act)

    def met(self, routings: Sequence[Routing]) -> None:
        """So many MoE layers, from the first on, are behind all."""
        for index, served in enumerate(self.at_once.walked(len(routings))):
            self.everybody.reach(index)
            layer = self.layers[index]
            if isinstance(layer, OffloadedExperts):
                layer.cache.found(layer.layer, served)
        self.count(routings)


class Step(Protocol):
    """A fused step that can do both."""

    def __call__(self, work: Sequence[Work], visit: Visitor) -> list[Tensor]:
        """Logits as of `moe.trunk.Trunk.lanes`; ``visit`` runs the experts."""

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, and of each MoE layer what was visited: nobody is asked to run experts."""


@dataclass(frozen=True)
class ResidentStep:
    """Runs experts within the step where it can.

    Attributes:
        together: how, with other ranks; None: it cannot.
    """

    step: Step
    resident: Resident
    experts: MoELayers
    together: Callable[[Sequence[Work], Visitor, Company], list[Tensor]] | None = None

    def __call__(self, work: Sequence[Work]) -> list[Tensor]:
        phase, visit = self.resident.phase(), visitor(self.experts.run)
        if phase is None:
            return self.step(work, visit)
        if self.experts.dispatcher.local:
            logits, visited = self.step.alone(work)
            self.resident.count(visited, phase)
            return logits
        company = self.resident.company(phase)
        if company is None or self.together is None:
            return self.step(work, visit)
        return self.together(work, visit, company)

    @property
    def where(self) -> str:
        """Whether experts are run within the step, and why not, for people."""
        why_not, shared = self.resident.why_not, self.resident.why_not_shared
        if self.together is not None and why_not and not shared:
            return f"experts outside: {why_not}; inside where ranks share them"
        return f"experts outside: {why_not}" if why_not else "experts inside"
