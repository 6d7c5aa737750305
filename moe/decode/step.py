"""A decode step, and the one place that chooses how it runs its experts (`DecodeForward`).

A decode step reads a few new tokens of each sequence and gives their logits. It runs in one of
four ways, all with the same bits, from the slowest to the fastest:

==================  ==========================  ====================================================
way                 computed by                 when
==================  ==========================  ====================================================
transformers        `Backbone.forward_packed`   neither a description of the model nor a recorded
                                                token is proven, or the profile says
                                                ``engine.fused: off``
call per MoE layer  `DecodeStep.__call__`       Python has to act at the layers: policies or methods
                                                changes calls, another lane waits at the layers,
                                                a prefetcher reads hidden states, experts run by
                                                a Python kernel, or a router has no known rule
experts inside      `DecodeStep.inside`         a single lane, and nothing of the above: experts in
                                                memory run inside the compiled call (or the CUDA
                                                graph); a compiled step calls Python only at layers
                                                that lack an expert
in lockstep         `DecodeStep.in_lockstep`    the same where ranks share the experts and each of
                                                them runs all MoE layers of the pass in compiled
                                                code
==================  ==========================  ====================================================

`Backbone.lanes` chooses the first way, `DecodeForward` the others. Prompts are read with a call per
MoE layer by a recorded token's program or by described layers (compiled on a CPU,
`moe.decode.device_prompts` on a GPU), or through transformers' layers: all prompts of a model in
the same way, as how a prompt is cut must not change its bits.
Legend: B rows, each one new token; H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from experts.dispatch import AllToAllDispatcher
from experts.dispatch.native import NativeDispatch
from kernels import experts_forward
from kernels.cpu.experts import LayerCall
from kernels.cpu.interface import check_done
from kernels.reference import AnyExperts
from moe.decode.records import CompiledPass
from moe.network.lanes import ExpertCall, ExpertsRunner, alone_with, call_experts
from moe.network.moe_layer import LockstepPass, MoELayers
from moe.network.packed_pass import Work, keep_hidden_rows
from offload.layer import LayerExperts, OffloadedExperts, held_experts
from routing import PHASES, Phase, Routing, RoutingStatistics

RoutedExperts = Callable[[int, Tensor, Routing], Tensor]
"""Runs the routed experts of one MoE layer: ``(layer, rows, routing) -> rows``, ``(B, H)``."""

StepFunction = Callable[[Sequence[Work], RoutedExperts], list[Tensor]]
"""A step with a call per MoE layer: the logits of each piece of work (`Backbone.lanes`)."""


class DecodeStep(Protocol):
    """A model's decode step by description: compiled code, or recorded CUDA graphs.

    Each method returns the logits of each piece of work; the sequences grow by the tokens read.

    Attributes:
        keeps_hidden: sequences that keep final hidden states get them (`moe.kv.hidden`).
    """

    keeps_hidden: bool

    def takes(self, work: Sequence[Work]) -> bool:
        """Return whether the step can read this work; else transformers' forward does."""

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Call ``routed`` at every MoE layer."""

    def inside(self, work: Sequence[Work], experts: InsideExperts) -> list[Tensor]:
        """Run the experts that are in memory as part of the step."""

    def in_lockstep(
        self, work: Sequence[Work], routed: RoutedExperts, group: RankGroup
    ) -> list[Tensor]:
        """Run experts together with other ranks; call ``routed`` from the layer on where a rank
        sends something else than in the last step."""


@runtime_checkable
class RecordsExperts(DecodeStep, Protocol):
    """A step that is recorded, and so can take other experts inside (`moe.decode.cuda_graph`)."""

    def inside_by(
        self, work: Sequence[Work], name: str, routed: RoutedExperts
    ) -> tuple[list[Tensor], list[Routing]]:
        """Run ``routed`` as part of the step: work of the device alone, with tensors that stay.

        Args:
            name: of a recording of its own; the same name, the same work.

        Returns:
            Logits as ever, and the routing that each MoE layer's router chose.
        """


class CompiledExperts(NamedTuple):
    """The experts of one MoE layer inside a compiled step.

    Attributes:
        call: the kernel's record, for C++.
        slots: ``(E + 1,)`` int64, live: where each expert is in the cache now, -1 for those that
            are not in memory; None where all are.
    """

    call: LayerCall
    slots: Tensor | None


class InsideExperts:
    """Experts that a step runs itself, all of them in memory: their use is only counted.

    Args:
        order: the MoE layer of each visit in a step. Looped models come to some layers again.
    """

    def __init__(self, statistics: RoutingStatistics, phase: Phase, order: Sequence[int]) -> None:
        self._statistics, self._phase, self._order = statistics, phase, order
        self._in_turn = is_in_turn(order)

    def count(self, ids_LBK: Tensor) -> None:
        """The step has run these experts, of all MoE layers in turn."""
        self._statistics.record_layers(0, self._phase, ids_LBK)

    def passed(self, first: int, end: int, step: CompiledPass) -> None:
        """A compiled step has run the experts of its visits from ``first`` on without a stop."""
        if self._in_turn:
            return self._statistics.record_layers(first, self._phase, step.ids_LBK[first:end])
        for at in range(first, end):
            ids = step.ids_LBK[at : at + 1]
            self._statistics.record_layers(self._order[at], self._phase, ids)
        return None

    def run(self, at: int, step: CompiledPass, call: LayerCall) -> Tensor | None:
        """Run the experts of the visit at which a compiled step has stopped.

        Returns:
            ``(B, H)``; None where the rows are already in `CompiledPass.rows`.
        """
        check_done(0)  # a router's ids are in range: it can only lack scratch memory
        return None


class CachedExperts(InsideExperts):
    """Experts in a cache, run inside the step, which stops where one is missing."""

    def __init__(
        self,
        statistics: RoutingStatistics,
        phase: Phase,
        order: Sequence[int],
        layers: Sequence[OffloadedExperts],
    ) -> None:
        super().__init__(statistics, phase, order)
        self._layers = layers

    def passed(self, first: int, end: int, step: CompiledPass) -> None:
        super().passed(first, end, step)
        for at in range(first, end):
            own = self._layers[self._order[at]]
            own.cache.found(own.layer, step.experts(at))

    def run(self, at: int, step: CompiledPass, call: LayerCall) -> Tensor | None:
        routing, layer = step.routing(at), self._order[at]
        self._statistics.record(layer, {self._phase: routing})
        asked, rows = step.experts(at), step.rows(at)
        return self._layers[layer].run_stopped(asked, call, rows, step.h_BH, routing)


class RankGroup(NamedTuple):
    """Ranks that share the experts, in a pass whose MoE layers all of them run.

    Attributes:
        native: the all-to-all with them.
        lockstep_pass: the pass.
        layers: the experts of this rank.
        counts: counts what was routed.
    """

    native: NativeDispatch
    lockstep_pass: LockstepPass
    layers: Sequence[LayerExperts]
    counts: InsideExperts

    def passed(self, step: CompiledPass, layers: int) -> None:
        """Take note that all ranks have run this many MoE layers, from the first on."""
        for layer, served in enumerate(self.native.finish_step(layers)):
            self.lockstep_pass.reach(layer)
            own = self.layers[layer]
            if isinstance(own, OffloadedExperts):
                own.cache.found(own.layer, served)
        if layers:
            self.counts.passed(0, layers, step)


def is_in_turn(order: Sequence[int]) -> bool:
    """Return whether a step visits each MoE layer once, from the first to the last."""
    return list(order) == list(range(len(order)))


def why_outside(experts: MoELayers, takes: Callable[[AnyExperts], bool]) -> str:
    """Why a step cannot run these experts itself; empty if it can.

    Args:
        takes: whether the step can run the experts of a layer without Python.
    """
    held = map(held_experts, experts.layers)
    if experts.forward is not experts_forward or not all(map(takes, held)):
        return "their kernel needs Python"
    return ""


class DecodeForward:
    """Reads decode work by a `DecodeStep`; chooses for each step how its experts run.

    Args:
        experts: the model's MoE layers, as the step was made for them.
        why_outside: why the step can never run experts itself; empty if it can.
        order: the MoE layer of each visit; None: each layer once, in turn.
    """

    def __init__(
        self,
        step: DecodeStep,
        experts: MoELayers,
        why_outside: str = "",
        order: Sequence[int] | None = None,
    ) -> None:
        self._step, self._experts, self._why_outside = step, experts, why_outside
        self._records = isinstance(step, RecordsExperts)  # asked each step, it takes 60 us
        order = range(len(experts.layers)) if order is None else order
        self._in_turn = is_in_turn(order)
        self._run, self._forward, self._layers = experts.run, experts.forward, [*experts.layers]
        self._routed = through_lane(experts.run)
        cached = [layer for layer in self._layers if isinstance(layer, OffloadedExperts)]
        self._cached, self._partly_cached = cached, 0 < len(cached) < len(self._layers)
        statistics = experts.statistics
        self._counts = {phase: InsideExperts(statistics, phase, order) for phase in PHASES}
        self._inside = self._counts
        if cached:
            self._inside = {
                phase: CachedExperts(statistics, phase, order, cached) for phase in PHASES
            }

    def takes(self, work: Sequence[Work]) -> bool:
        """See `DecodeStep`."""
        return self._step.takes(work)

    def __call__(self, work: Sequence[Work]) -> list[Tensor]:
        experts = self._experts
        phase = self._phase_inside()
        if phase is None:
            return self._step(work, self._routed)
        if not experts.dispatcher.local:
            group = self._rank_group(phase)
            if group is None:
                return self._step(work, self._routed)
            return self._step.in_lockstep(work, self._routed, group)
        if self._cached and (self._partly_cached or experts.looks_ahead):
            return self._step(work, self._routed)
        return self._step.inside(work, self._inside[phase])

    @property
    def step(self) -> DecodeStep:
        """The step that it reads by."""
        return self._step

    @property
    def keeps_hidden(self) -> bool:
        """See `DecodeStep`."""
        return self._step.keeps_hidden

    @property
    def all_inside(self) -> bool:
        """All experts are in memory here, and nothing has to act at the MoE layers."""
        here = self._experts.dispatcher.local and not self._cached
        return here and not self._changes_routing

    @property
    def runs_ahead(self) -> bool:
        """A step is one recording, which the host does not wait for."""
        return self._records and self.all_inside

    def count_inside(self, ids_LBK: Tensor) -> None:
        """A compiled call has run these experts, of all MoE layers in turn, in a decode step."""
        self._experts.statistics.record_layers(0, "decode", ids_LBK)

    @property
    def where(self) -> str:
        """Return whether experts run inside the step, and why not, for people."""
        return f"experts outside: {self._why_outside}" if self._why_outside else "experts inside"

    def _phase_inside(self) -> Phase | None:
        """The phase of the running lane; None if Python has to act at the MoE layers."""
        if self._changes_routing:
            return None
        if self._cached and not all(layer.only_kernels for layer in self._cached):
            return None
        return alone_with(self._run)

    @property
    def _changes_routing(self) -> bool:
        """Python has to act at the MoE layers, or they are not those that the step was made for."""
        experts = self._experts
        if self._why_outside or experts.policies.policies or experts.transform is not None:
            return True
        return experts.layers != self._layers or experts.forward is not self._forward

    def _rank_group(self, phase: Phase) -> RankGroup | None:
        """The other ranks, if each of them runs all layers of this pass in compiled code."""
        dispatcher, ranks_pass = self._experts.dispatcher, self._experts.lockstep_pass
        native = dispatcher.native if isinstance(dispatcher, AllToAllDispatcher) else None
        if native is None or ranks_pass is None or ranks_pass.left != len(self._layers):
            return None
        if not self._in_turn:  # a visit's number is not its layer's, which ranks tell each other
            return None
        return RankGroup(native, ranks_pass, self._experts.layers, self._counts[phase])


def through_lane(run_experts: ExpertsRunner) -> RoutedExperts:
    """Brings rows to a model's MoE layers as its own modules do: through the running lane."""

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return call_experts(ExpertCall(layer, rows, routing), run_experts)

    return routed


def finish_step(
    work: Sequence[Work], logits: Tensor, hidden_BH: Tensor | None = None
) -> list[Tensor]:
    """Let the sequences grow by the tokens read; split ``(B, V)`` logits by piece of work.

    Args:
        hidden_BH: final hidden states, which sequences may keep (`moe.kv.hidden`); None if
            the step does not have them.
    """
    for item in work:
        item.cache.length += len(item.token_ids)
    if hidden_BH is not None:
        keep_hidden_rows(work, hidden_BH)
    return split_logits(work, logits)


def split_logits(work: Sequence[Work], logits: Tensor) -> list[Tensor]:
    """``(B, V)`` by piece of work: of all its tokens, or of the last; prompts have no others."""
    if len(work) == len(logits):
        return list(logits.split(1))
    sizes = [len(item.token_ids) for item in work]
    if sum(sizes) != len(logits):
        wanted = zip(work, sizes, strict=True)
        return list(logits.split([size if item.all_logits else 1 for item, size in wanted]))
    parts = logits.split(sizes)
    return [p if item.all_logits else p[-1:] for item, p in zip(work, parts, strict=True)]
