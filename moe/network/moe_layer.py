"""The MoE layers of a model: the way of a token from its router to its experts and back.

1. Router: the model's own module chooses experts; `moe.network.seam` makes an `ExpertCall` of its
   hidden states and `Routing`, which waits in a lane. `run_lanes` hands all calls that wait at a
   layer to `MoELayers.run`.
2. Policies: `MoELayers.gather` joins the calls; `decide` lets the routing policies change them.
3. Dispatch: the `Dispatcher` sends rows to the ranks that hold their experts (`experts.dispatch`);
   without other ranks nothing moves.
4. Experts: `serve` runs the rows that this rank has received (`run_experts`).
5. Combine: the dispatcher returns each token's weighted sum; `GatheredCalls.outcomes` splits the
   rows by call, and the lanes go on.

If an expert cannot be read or run, only the rows that need it are lost: they are found by their
expert ids, and the others run again. Under expert parallelism all ranks meet at every MoE layer
that any of them visits, also with no tokens of their own (`MoELayers.lockstep`).
Legend: T tokens, H hidden, K slots, E experts.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from experts.dispatch import Combined, Dispatched, Dispatcher, Failure, LocalDispatcher
from kernels import Forward, experts_forward
from kernels.reference import sum_dtype
from moe.network.lanes import ExpertCall
from offload.errors import OffloadError
from offload.layer import LayerExperts, OffloadedExperts, held_experts
from offload.prefetch import Prefetcher
from routing import (
    LOADED_FOR,
    PHASES,
    LoadedFor,
    Phase,
    PolicyChain,
    Routing,
    RoutingContext,
    RoutingStatistics,
)
from routing.predict import Forecast
from routing.routers import RouterRule

_logger = logging.getLogger("moe")


class CallTransform(Protocol):
    """Changes calls before the routing policies do.

    Attributes:
        readings: how often a pass has each token; the second reading of all behind the first.
    """

    @property
    def readings(self) -> int: ...

    def __call__(self, layer: int, call: ExpertCall) -> ExpertCall: ...


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Attributes:
        policies: change the routings of a layer before its experts run; none until `set_policies`,
            as they would disturb probes that compare ways to compute the model as it is.
        selectors: one a layer if a policy chooses experts again, else none.
        dispatcher: sends rows to the ranks that serve them; may change between steps.
        lockstep_pass: the pass of all ranks that is going on; None: no other rank is met.
        forward: runs a layer's experts.
        transform: changes calls before the policies do; None: nothing does.
        statistics: of all routings, by layer and phase.
        visits: the MoE layer of each visit of a pass. Looped models come to some layers again.

    Args:
        layers: experts of each MoE layer.
        prefetcher: reads experts ahead that decode steps will need; None if all are in memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        forward: Forward = experts_forward,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.layers = list(layers)
        self.visits: Sequence[int] = range(len(self.layers))
        self.policies = PolicyChain()
        self.selectors: Sequence[Selector] = ()
        self.dispatcher: Dispatcher[Any] = LocalDispatcher()
        self.lockstep_pass: LockstepPass | None = None
        self.forward = forward
        self.transform: CallTransform | None = None
        self._prefetcher, self._decoding = prefetcher, 0
        self.statistics = RoutingStatistics([layer.num_experts for layer in layers])

    def set_policies(
        self, policies: PolicyChain, selectors: Sequence[Selector] | None = None
    ) -> None:
        """Let these policies change routings from now on.

        Args:
            selectors: of each layer, if a policy chooses experts again; None: those set before.
        """
        self.policies = policies
        if selectors is not None:
            self.selectors = selectors

    def set_visits(self, visits: Sequence[int]) -> None:
        """Take over the visits of a pass that `moe.describe.probe.find_visits` has seen."""
        self.visits = visits

    def set_transform(self, transform: CallTransform | None) -> None:
        """Change each call by ``transform`` from now on; None: none."""
        self.transform = transform

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
        """Rows ``(T_i, H)`` of each call, in its own dtype.

        If an expert cannot be read, the calls that need it fail: a single call raises
        `OffloadError`, of several each gets its own. With other ranks a pass cannot be begun again
        without them: then the rows concerned are zeros, and `ExpertCall.lost` says why.
        """
        if self.lockstep_pass is not None:
            self.lockstep_pass.reach(layer)
        gathered = self.gather(layer, calls)
        if self.dispatcher.local and len(calls) == 1:
            experts, rows = self.layers[layer], calls[0].hidden_states
            prefetcher = self._prefetcher_for(calls)
            return [run_experts(rows, gathered.routing, experts, self.forward, prefetcher)]
        dispatched = self.dispatcher.dispatch(layer, gathered.hidden_states, gathered.routing)
        prefetcher = self._prefetcher_for(calls) if self.dispatcher.local else None
        rows, failures = serve(dispatched, self.layers[layer], self.forward, prefetcher)
        combined = self.dispatcher.combine(dispatched, rows, failures, gathered.run_beside)
        return gathered.outcomes(combined)

    def gather(self, layer: int, calls: Sequence[ExpertCall]) -> GatheredCalls:
        """Join the calls at a layer and let the policies decide.

        If other ranks wait for this one, nothing is raised: with an error, it has no tokens.
        """
        if self.transform is not None:
            calls = [self.transform(layer, call) for call in calls]
        experts, local = self.layers[layer], self.dispatcher.local
        selector = self.selectors[layer] if self.selectors else None
        try:
            if calls:
                routing = decide(self.policies, layer, calls, experts, selector)
                self.statistics.record(layer, _by_phase(routing, calls))
                hidden = [call.hidden_states for call in calls]
                joint = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
                return GatheredCalls(calls, joint, routing, local)
            error = None
        except Exception as reason:
            if local:
                raise
            error = reason
        nothing, no_rows = torch.empty(0, 1), torch.empty(0, experts.hidden_size)
        return GatheredCalls(calls, no_rows, Routing(nothing.long(), nothing), local, error)

    @contextmanager
    def lockstep(
        self, visits: Sequence[int], dispatcher: Dispatcher[Any] | None = None
    ) -> Iterator[None]:
        """A pass of all ranks: each makes some of these visits, and serves the others at the rest.

        Args:
            visits: the layer of each visit that any rank makes; the same on every rank.
            dispatcher: brings rows to other ranks during the pass; None: the present one.

        Raises:
            ExchangeError: at the end, if the ranks have lost each other.
        """
        assert self.lockstep_pass is None, "a pass within a pass"
        before = self.dispatcher
        self.dispatcher = dispatcher or before
        own = LockstepPass(() if self.dispatcher.local else visits, self._serve_others)
        self.lockstep_pass = None if self.dispatcher.local else own
        try:
            try:
                yield
            finally:
                self.lockstep_pass = None
                own.finish()
            self.dispatcher.check()
        finally:
            self.dispatcher = before

    def take_pass(self) -> list[int]:
        """The layers of the pass, for a caller that meets the others at each of them."""
        assert self.lockstep_pass is not None, "no other ranks to meet"
        return self.lockstep_pass.take()

    def _serve_others(self, layer: int) -> None:
        """Take part in a layer without tokens of this rank."""
        gathered = self.gather(layer, [])
        with torch.inference_mode():
            dispatched = self.dispatcher.dispatch(layer, gathered.hidden_states, gathered.routing)
            rows, failures = serve(dispatched, self.layers[layer], self.forward)
            self.dispatcher.combine(dispatched, rows, failures)

    @property
    def context(self) -> int:
        """The number of a sequence's last tokens that `begin` wants; 0 without a prefetcher."""
        return 0 if self._prefetcher is None else self._prefetcher.predictor.context

    @property
    def looks_ahead(self) -> bool:
        """Return whether the prefetcher wants to hear of every layer that runs."""
        return self._prefetcher is not None and self._prefetcher.awake

    def begin(self, contexts: Sequence[Sequence[int]], forecast: Forecast | None = None) -> None:
        """Begin a decode step.

        Args:
            contexts: of each token that the step decodes, the last `context` tokens of its sequence
                up to it, or fewer.
            forecast: the experts that a draft of this step has used; None without a draft.
        """
        if self.transform is not None:
            contexts = [*contexts] * self.transform.readings
        self._decoding = len(contexts)
        if self._prefetcher is not None and contexts and self.dispatcher.local:
            self._prefetcher.start(contexts, forecast)

    def prefetch_early(self, forecast: Forecast) -> None:
        """Prefetch for the next step, by what its draft has used so far."""
        if self._prefetcher is not None and self.dispatcher.local:
            self._prefetcher.bid_early(forecast)

    def _prefetcher_for(self, calls: Sequence[ExpertCall]) -> Prefetcher | None:
        """The prefetcher, if these calls have exactly the tokens of `begin`."""
        if self._prefetcher is None:
            return None
        tokens = sum(len(call.hidden_states) for call in calls)
        decode = all(call.phase == "decode" for call in calls)
        return self._prefetcher if decode and tokens == self._decoding else None

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.expert_bytes * layer.num_experts for layer in self.layers)

    @property
    def expert_bytes_read_by(self) -> dict[LoadedFor, int]:
        """Expert bytes read since the statistics were reset, by whose tokens needed the expert."""
        loads = [self.statistics.expert_loads_by(index) for index in range(len(self.layers))]
        return {
            reader: sum(
                by[reader] * layer.expert_bytes
                for by, layer in zip(loads, self.layers, strict=True)
            )
            for reader in LOADED_FOR
        }


@dataclass
class GatheredCalls:
    """The joint tokens of all calls at a layer.

    Attributes:
        hidden_states: ``(T, H)`` of all calls.
        routing: after the policies.
        local: no other rank is concerned.
        error: why there are no tokens although there are calls.
    """

    calls: Sequence[ExpertCall]
    hidden_states: Tensor
    routing: Routing
    local: bool
    error: Exception | None = None

    def run_beside(self) -> None:
        """Compute what the lanes will need behind the layer. A lane whose work raises meets that
        error itself, when it asks again."""
        for call in self.calls:
            if call.beside is not None:
                with suppress(Exception):
                    call.beside()

    def outcomes(self, combined: Combined) -> list[Tensor | Exception]:
        """The rows of each call, or why it has none. Raises `error`."""
        if self.error is not None:
            raise self.error
        sizes = [len(call.hidden_states) for call in self.calls]
        if (codes := combined.codes) is not None:
            for call, own_T in zip(self.calls, codes.codes_T.split(sizes), strict=True):
                call.codes = codes._replace(codes_T=own_T)
        rows: list[Tensor | Exception] = list(combined.rows.split(sizes))
        if not combined.failures:
            return rows
        owner = [(at, row) for at, size in enumerate(sizes) for row in range(size)]
        for token, failure in combined.failures.items():
            at, row = owner[token]
            if self.local:
                rows[at] = OffloadError(failure.reason)
            else:
                self.calls[at].lost[row] = failure
        return rows


@dataclass(frozen=True)
class Selector:
    """The router of one MoE layer as a value that can choose again, for policies and drafts.

    `moe.describe.routers` finds it.
    """

    weight: Tensor  # (E, H); the model's own
    bias: Tensor | None  # (E,)
    rule: RouterRule

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """``(T, E)`` float32 of rows ``(T, H)``: the basis of weights (`RouterRule`)."""
        return self.rule.scores(linear(hidden.float(), self.weight.float(), self.bias))

    def scores_of(self, calls: Sequence[ExpertCall]) -> Tensor:
        """``(T, E)`` float32 of the tokens of all calls."""
        return self.scores(torch.cat([call.hidden_states for call in calls]))

    @torch.inference_mode()
    def select(
        self, scores: Tensor, allowed: Tensor | None = None, top_k: int | None = None
    ) -> Routing:
        """The router's decision, or its choice of ``top_k`` among the ``allowed`` experts
        (`RouterRule.select`). Weights are only renormalised if the router itself does so."""
        return self.rule.select(scores, allowed, top_k)


@dataclass(frozen=True)
class WatchedSelector(Selector):
    """A router that reads other rows than its experts: its own scores come with each call."""

    def scores_of(self, calls: Sequence[ExpertCall]) -> Tensor:
        return torch.cat([call.scores for call in calls if call.scores is not None])


@dataclass(frozen=True)
class FoundSelector:
    """One MoE layer's selector; ``reason`` says why there is none."""

    selector: Selector | None
    reason: str = ""


def decide(
    chain: PolicyChain,
    layer: int,
    calls: Sequence[ExpertCall],
    experts: LayerExperts,
    selector: Selector | None = None,
) -> Routing:
    """The routing of the tokens of all calls, in their order, after the policies.

    Policies see the tokens of each phase together; under expert parallelism, this rank's.

    Args:
        chain: of policies; the empty one leaves the routers' decisions as they are.
        layer: index of the MoE layer.
        experts: of that layer.
        selector: of that layer, where a policy needs one.
    """
    decided = [call.routing for call in calls]
    for phase in PHASES if chain.policies else ():
        places = [place for place, call in enumerate(calls) if call.phase == phase]
        if places:
            own = [calls[place] for place in places]
            context = _context(chain, layer, phase, own, experts, selector)
            routing = chain(Routing.concat([call.routing for call in own]), context)
            parts = routing.split([call.hidden_states.shape[0] for call in own])
            for place, part in zip(places, parts, strict=True):
                decided[place] = part
    return Routing.concat(decided)


def _context(
    chain: PolicyChain,
    layer: int,
    phase: Phase,
    calls: Sequence[ExpertCall],
    experts: LayerExperts,
    selector: Selector | None,
) -> RoutingContext:
    scores_TE = select = resident_E = None
    if "select" in chain.needs:
        assert selector is not None, "refused while loading"
        given_TE = selector.scores_of(calls)
        scores_TE, select = selector.rule.ranking(given_TE), partial(selector.select, given_TE)
    if "resident" in chain.needs and isinstance(experts, OffloadedExperts):
        resident_E = experts.cache.resident(experts.layer).to(calls[0].hidden_states.device)
    return RoutingContext(layer, experts.num_experts, phase, scores_TE, select, resident_E)


def serve(
    dispatched: Dispatched,
    experts: LayerExperts,
    forward: Forward,
    prefetcher: Prefetcher | None = None,
) -> tuple[Tensor, dict[int, Failure]]:
    """Run the experts of this rank on the rows that a dispatcher has brought.

    Returns:
        Results of all rows, zeros for those that failed; and why, by row. If results go to other
        ranks, nothing is raised: they wait for an answer.
    """
    rows, routing = dispatched.hidden_states, dispatched.routing
    distributed = dispatched.distributed
    dtype = sum_dtype(held_experts(experts)) if distributed else rows.dtype

    def run(rows: Tensor, routing: Routing, prefetcher: Prefetcher | None) -> Tensor:
        wider = dtype != rows.dtype or not len(rows)
        add_to = rows.new_zeros(rows.shape, dtype=dtype) if distributed and wider else None
        return run_experts(rows, routing, experts, forward, prefetcher, add_to)

    try:
        return run(rows, routing, prefetcher), {}
    except OffloadError as error:
        failures = _lost(experts, routing, error)
    except Exception as error:
        if not distributed:
            raise
        # Logged here, as the request fails on another rank; without the message, which may quote
        # a client.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _logger.error("experts failed: %s\n%s", type(error).__name__, frames)
        fault = Failure(f"{type(error).__name__}: {error}", unreadable=False)
        failures = dict.fromkeys(range(len(rows)), fault)
    results = rows.new_zeros(rows.shape, dtype=dtype)
    left = torch.tensor([row for row in range(len(rows)) if row not in failures], dtype=torch.int64)
    try:
        some = Routing(routing.expert_ids[left], routing.weights[left])
        results[left] = run(rows[left], some, None)  # its forecasts are for all rows
    except OffloadError as error:
        failures |= dict.fromkeys(left.tolist(), Failure(str(error), unreadable=True))
    return results, failures


def run_experts(
    rows: Tensor,
    routing: Routing,
    experts: LayerExperts,
    forward: Forward,
    prefetcher: Prefetcher | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``(N, H)``: each row's weighted sum of its experts.

    Args:
        prefetcher: is given the experts that are needed, if they are in a cache.
        add_to: as in `kernels.experts_forward`.

    Raises:
        OffloadError: an expert cannot be read.
    """
    ids, weights = routing.expert_ids, routing.weights
    if isinstance(experts, OffloadedExperts):
        return experts.forward(rows, ids, weights, forward, prefetcher, add_to)
    return forward(rows, ids, weights, experts, add_to)


def _lost(experts: LayerExperts, routing: Routing, error: OffloadError) -> dict[int, Failure]:
    """The rows whose experts cannot be read."""
    ids = routing.expert_ids.tolist()
    if not isinstance(experts, OffloadedExperts):
        return dict.fromkeys(range(len(ids)), Failure(str(error), unreadable=True))
    wanted = sorted({expert for row in ids for expert in row if expert >= 0})
    lost = experts.unreadable(wanted)
    reasons = {row: [lost[e] for e in row_ids if e in lost] for row, row_ids in enumerate(ids)}
    return {row: Failure(str(found[0]), True) for row, found in reasons.items() if found}


class LockstepPass:
    """One pass of all ranks through the MoE layers.

    Args:
        visits: the layer of each visit that any rank makes; the same on every rank.
        join: takes part in a layer without tokens of this rank.
    """

    def __init__(self, visits: Sequence[int], join: Callable[[int], None]) -> None:
        self._ahead = list(reversed(visits))
        self._join = join

    @property
    def left(self) -> int:
        """Number of visits that are still ahead."""
        return len(self._ahead)

    def reach(self, layer: int) -> None:
        """Join the visits before the next one of this layer, which the caller is about to run.

        Raises:
            OffloadError: the other ranks have passed this layer or skip it, as when a forward pass
                that failed is begun again.
        """
        if layer not in self._ahead:
            raise OffloadError(
                f"MoE layer {layer} cannot be visited again: the other ranks do not come back to it"
            )
        while (before := self._ahead.pop()) != layer:
            self._join(before)

    def take(self) -> list[int]:
        """The layers that are left, for a caller that will meet the others at each of them."""
        layers, self._ahead = self._ahead[::-1], []
        return layers

    def finish(self) -> None:
        """Join the layers that are left."""
        while self._ahead:
            self._join(self._ahead.pop())


def _by_phase(routing: Routing, calls: Sequence[ExpertCall]) -> dict[Phase, Routing]:
    """The joint routing of the calls, split by phase."""
    if len(calls) == 1 or len({call.phase for call in calls}) == 1:
        return {calls[0].phase: routing}
    parts = routing.split([call.hidden_states.shape[0] for call in calls])
    return {
        phase: Routing.concat(
            [part for call, part in zip(calls, parts, strict=True) if call.phase == phase]
        )
        for phase in PHASES
        if any(call.phase == phase for call in calls)
    }
