"""The MoE layers of a model: policies, experts and combination for what the lanes brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from experts.dispatch import Dispatcher, LocalDispatcher
from kernels import Forward, experts_forward
from moe.expert_rows import Brought, run_rows, serve
from moe.parallel.lockstep import Pass
from moe.policing import decide
from moe.selector import Selector
from moe.visit import Visit
from offload.experts import LayerExperts
from offload.prefetch import Prefetcher
from routing import PHASES, READERS, Phase, PolicyChain, Reader, Routing, RoutingStatistics
from routing.predict import Forecast


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Attributes:
        policies: applied to the routings of a layer before its experts run; none at first, as they
            would be in the way of whoever compares ways to compute the model as it is.
        selectors: one a layer where a policy chooses again (`moe.policing`), else none.
        dispatcher: brings rows to the experts that serve them; may change between steps.
        everybody: the pass of all ranks that is going on; None: no other rank is met.
        forward: what runs a layer's experts.
        weaken: changes visits before the policies do (`moe.speculate.contrast`).

    Args:
        layers: experts of each MoE layer.
        forward: see above.
        prefetcher: brings experts nearer that decode steps will need; none where all are in memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        forward: Forward = experts_forward,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.layers = list(layers)
        self.policies = PolicyChain()
        self.selectors: Sequence[Selector] = ()
        self.dispatcher: Dispatcher[Any] = LocalDispatcher()
        self.everybody: Pass | None = None
        self.forward = forward
        self.weaken: Callable[[int, Visit], Visit] | None = None
        self._prefetcher, self._decoding = prefetcher, 0
        self.statistics = RoutingStatistics([layer.num_experts for layer in layers])

    @property
    def context(self) -> int:
        """How many of a sequence's last tokens `begin` wants; 0 where nobody looks ahead."""
        return 0 if self._prefetcher is None else self._prefetcher.predictor.context

    def begin(self, contexts: Sequence[Sequence[int]], told: Forecast | None = None) -> None:
        """A step begins that decodes these tokens.

        Args:
            contexts: of each, the last `context` tokens of its sequence up to it, or fewer.
            told: what the step will need, as a draft of it has found; None where there is none.
        """
        if self.weaken is not None:
            contexts = [*contexts, *contexts]  # each token's weak reading, behind all others
        self._decoding = len(contexts)
        if self._prefetcher is not None and contexts and self.dispatcher.local:
            self._prefetcher.start(contexts, told)

    @property
    def looks_ahead(self) -> bool:
        """Whether somebody wants to hear of every layer as it is visited."""
        return self._prefetcher is not None and self._prefetcher.awake

    def foretell(self, told: Forecast) -> None:
        """What the next step will need, as far as a draft of it that goes on has found."""
        if self._prefetcher is not None and self.dispatcher.local:
            self._prefetcher.foretell(told)

    @contextmanager
    def lockstep(self, layers: Iterable[int]) -> Iterator[None]:
        """A pass of all ranks: each visits some of these layers, and joins the others at the rest.

        Args:
            layers: that any rank visits, the same on every rank.

        Raises:
            ExchangeError: at the end, if the ranks have lost each other.
        """
        assert self.everybody is None, "a pass within a pass"
        everybody = Pass(() if self.dispatcher.local else layers, self._join)
        self.everybody = None if self.dispatcher.local else everybody
        try:
            yield
        finally:
            self.everybody = None
            everybody.finish()
        self.dispatcher.check()

    def take_pass(self) -> list[int]:
        """The layers of the pass, ascending, for a caller that brings to each what there is."""
        assert self.everybody is not None, "no other ranks to meet"
        return self.everybody.take()

    def run(self, layer: int, visits: Sequence[Visit]) -> list[Tensor | Exception]:
        """Rows ``(T_i, H)`` of each visit, in its own dtype.

        Where an expert cannot be read, those visits fail that need it: one alone raises
        `OffloadError`, of several each gets its own. Where other ranks are met, a pass cannot be
        begun again without them: then the rows concerned are zeros, and `Visit.lost` says why.
        """
        if self.everybody is not None:
            self.everybody.reach(layer)
        brought = self.bring(layer, visits)
        if self.dispatcher.local and len(visits) == 1:
            experts, rows = self.layers[layer], visits[0].hidden_states
            prefetcher = self._prefetcher_for(visits)
            return [run_rows(rows, brought.routing, experts, self.forward, prefetcher)]
        dispatched = self.dispatcher.dispatch(layer, brought.hidden_states, brought.routing)
        prefetcher = self._prefetcher_for(visits) if self.dispatcher.local else None
        rows, failures = serve(dispatched, self.layers[layer], self.forward, prefetcher)
        return brought.outcomes(self.dispatcher.combine(dispatched, rows, failures))

    def bring(self, layer: int, visits: Sequence[Visit]) -> Brought:
        """What visits bring to a layer, after the policies. Where other ranks wait for this one,
        nothing is raised: with an error, it brings nothing."""
        if self.weaken is not None:
            visits = [self.weaken(layer, visit) for visit in visits]
        experts, here = self.layers[layer], self.dispatcher.local
        selector = self.selectors[layer] if self.selectors else None
        try:
            if visits:
                routing = decide(self.policies, layer, visits, experts, selector)
                self.statistics.record(layer, _by_phase(routing, visits))
                hidden = [visit.hidden_states for visit in visits]
                joint = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
                return Brought(visits, joint, routing, here)
            error = None
        except Exception as reason:
            if here:
                raise
            error = reason
        nothing, no_rows = torch.empty(0, 1), torch.empty(0, experts.hidden_size)
        return Brought(visits, no_rows, Routing(nothing.long(), nothing), here, error)

    def _prefetcher_for(self, visits: Sequence[Visit]) -> Prefetcher | None:
        """Forecasts are for the sequences of `begin` alone."""
        if self._prefetcher is None:
            return None
        tokens = sum(len(visit.hidden_states) for visit in visits)
        decode = all(visit.phase == "decode" for visit in visits)
        return self._prefetcher if decode and tokens == self._decoding else None

    def _join(self, layer: int) -> None:
        """Serve others at a layer."""
        brought = self.bring(layer, [])
        with torch.inference_mode():
            dispatched = self.dispatcher.dispatch(layer, brought.hidden_states, brought.routing)
            rows, failures = serve(dispatched, self.layers[layer], self.forward)
            self.dispatcher.combine(dispatched, rows, failures)

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
    if len(visits) == 1 or len({visit.phase for visit in visits}) == 1:
        return {visits[0].phase: routing}
    parts = routing.split([visit.hidden_states.shape[0] for visit in visits])
    return {
        phase: Routing.concat(
            [part for visit, part in zip(visits, parts, strict=True) if visit.phase == phase]
        )
        for phase in PHASES
    }
