"""Experts that a step runs by itself, while nobody else is concerned, or all ranks do the same.

At the layers there is then nothing to decide: every expert is in memory, no policy changes a
routing, no other lane is met, and the kernels leave Python out. What was routed is counted
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from experts.dispatch import AllToAllDispatcher
from experts.dispatch.native import NativeDispatch
from kernels import experts_forward
from kernels.cpu.experts import LayerCall
from kernels.cpu.streaming import LayerBuffers
from kernels.reference import AnyExperts
from moe.decode.base import RoutedExperts, Step, through_lane
from moe.network.kv_cache import Work
from moe.network.lanes import alone_with
from moe.network.moe_layer import MoELayers, Pass
from offload.layer import LayerExperts, OffloadedExperts, held_experts
from routing import Phase, Routing


class Inside(NamedTuple):
    """What runs a layer's experts within a step.

    Attributes:
        call: for C++.
        slots: ``(E + 1,)`` int64, live: where each expert is now, -1 for those that are not in
            memory; None where all are.
    """

    call: LayerCall
    slots: Tensor | None


class Resident:
    """The experts of a model, as a step sees them that runs them by itself.

    Attributes:
        why_not: what forbids that a step runs them by itself at any time; empty if nothing does.
        cached: layers of which some experts are in memory at a time.
        inside: how the step runs each layer; set by who makes the step.

    Args:
        experts: the model's MoE layers.
        takes: whether the step can run a layer's experts without Python.
    """

    def __init__(self, experts: MoELayers, takes: Callable[[AnyExperts], bool]) -> None:
        self._experts, self._layers, self._runner = experts, list(experts.layers), experts.run
        self.cached = [one for one in experts.layers if isinstance(one, OffloadedExperts)]
        self.inside: Sequence[Inside] = ()
        held, self.why_not = map(held_experts, experts.layers), ""
        if experts.forward is not experts_forward or not all(map(takes, held)):
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
        if self.why_not or changed:
            return None
        if experts.layers != self._layers or experts.forward is not experts_forward:
            return None  # not what the step has been made with
        return alone_with(self._runner)

    def count(self, routings: Sequence[Routing], phase: Phase) -> None:
        """Statistics of a step that has run the experts of every layer by itself."""
        for layer, routing in enumerate(routings):
            self.record(layer, routing, phase)

    def near(self, phase: Phase) -> Near | None:
        """The experts where some are in memory and nobody else has to act at a layer: their slots
        are kernels' own, and nobody looks ahead from the rows."""
        everywhere = len(self.cached) == len(self._layers)
        if self._experts.looks_ahead or not self.plain or not everywhere:
            return None
        return Near(self.cached, self.inside, partial(self.record, phase=phase))

    def record(self, layer: int, routing: Routing, phase: Phase) -> None:
        """Statistics of a layer."""
        self._experts.statistics.record(layer, {phase: routing})

    @property
    def plain(self) -> bool:
        """Whether kernels run what is in a cache as it is."""
        return all(layer.plain for layer in self.cached)

    def company(self, phase: Phase) -> Company | None:
        """The other ranks, where each may meet them at all layers of a pass without Python."""
        experts = self._experts
        way, everybody = experts.dispatcher, experts.everybody
        native = way.native if isinstance(way, AllToAllDispatcher) else None
        if native is None or everybody is None or everybody.left != len(self._layers):
            return None
        if not self.plain:
            return None
        return Company(native, everybody, experts.layers, partial(self.count, phase=phase))


@dataclass(frozen=True)
class Company:
    """Ranks that share the experts, in a pass.

    Attributes:
        native: the all-to-all with them.
        everybody: the pass.
        layers: what this rank has of the experts.
        count: hears of what was routed.
    """

    native: NativeDispatch
    everybody: Pass
    layers: Sequence[LayerExperts]
    count: Callable[[Sequence[Routing]], None]

    def meeting(self, rows: int, hidden: int, slots: int) -> int | None:
        """As `NativeDispatch.step_address`."""
        return self.native.step_address(rows, hidden, slots)

    def run(self, act: Callable[[], int]) -> int:
        """Calls what meets them."""
        return self.native.run(act)

    def met(self, routings: Sequence[Routing]) -> None:
        """So many MoE layers, from the first on, are behind all."""
        for index, served in enumerate(self.native.finish_step(len(routings))):
            self.everybody.reach(index)
            layer = self.layers[index]
            if isinstance(layer, OffloadedExperts):
                layer.cache.found(layer.layer, served)
        self.count(routings)


@dataclass(frozen=True)
class Near:
    """Experts in a cache, in a step of a lane that is alone.

    Attributes:
        layers: where some of them are in memory.
        inside: how each is run.
        record: hears of what was routed.
    """

    layers: Sequence[OffloadedExperts]
    inside: Sequence[Inside]
    record: Callable[[int, Routing], None]

    def passed(self, layer: int, asked: Sequence[int], routing: Routing) -> None:
        """All experts that an MoE layer has asked for were there, and have been run."""
        self.record(layer, routing)
        self.layers[layer].cache.found(layer, asked)

    def run(
        self,
        layer: int,
        asked: Sequence[int],
        rows: LayerBuffers,
        rows_BH: Tensor,
        routing: Routing,
    ) -> Tensor | None:
        """As `OffloadedExperts.run`."""
        self.record(layer, routing)
        return self.layers[layer].run(asked, self.inside[layer].call, rows, rows_BH, routing)


@dataclass(frozen=True)
class ResidentStep:
    """Runs experts within the step where it can.

    Attributes:
        nearby: how, with experts in a cache; None: it cannot.
        together: how, with other ranks; None: it cannot.
    """

    step: Step
    resident: Resident
    experts: MoELayers
    nearby: Callable[[Sequence[Work], Near], list[Tensor]] | None = None
    together: Callable[[Sequence[Work], RoutedExperts, Company], list[Tensor]] | None = None

    def __call__(self, work: Sequence[Work]) -> list[Tensor]:
        phase, routed = self.resident.phase(), through_lane(self.experts.run)
        if phase is None:
            return self.step(work, routed)
        if self.experts.dispatcher.local and self.resident.cached:
            near = self.resident.near(phase)
            if near is None or self.nearby is None:
                return self.step(work, routed)
            return self.nearby(work, near)
        if self.experts.dispatcher.local:
            logits, visited = self.step.alone(work)
            self.resident.count(visited, phase)
            return logits
        company = self.resident.company(phase)
        if company is None or self.together is None:
            return self.step(work, routed)
        return self.together(work, routed, company)

    @property
    def where(self) -> str:
        """Whether experts are run within the step, and why not, for people."""
        why_not, cached = self.resident.why_not, self.resident.cached
        if cached and self.nearby is None:
            why_not = why_not or "not all of them are in memory"
        if why_not:
            return f"experts outside: {why_not}"
        return "experts inside"
