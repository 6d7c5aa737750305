"""The MoE layers of a model: policies, experts and combination for what the lanes brought."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.dispatch import Combined, Dispatched, Dispatcher, Failure, LocalDispatcher
from kernels import Forward, experts_forward
from kernels.reference import sum_dtype
from moe.network.lanes import ExpertCall
from moe.network.routing_policies import Selector, decide
from offload.errors import OffloadError
from offload.layer import LayerExperts, OffloadedExperts, held_experts
from offload.prefetch import Prefetcher
from routing import PHASES, READERS, Phase, PolicyChain, Reader, Routing, RoutingStatistics
from routing.predict import Forecast

# ---- Rows at an MoE layer: what visits bring, and what a dispatcher brings run through the
# experts of this rank, which are all where there is no other.
#
# What cannot be had costs only the rows that need it: they are found by their experts, and the
# others are run again.

_logger = logging.getLogger("moe")


@dataclass
class Brought:
    """Tokens of all visits at a layer.

    Attributes:
        calls: that brought them.
        hidden_states: ``(T, H)`` of all of them.
        routing: after the policies.
        local: no other rank is concerned.
        error: why there are no tokens although there are visits.
    """

    calls: Sequence[ExpertCall]
    hidden_states: Tensor
    routing: Routing
    local: bool
    error: Exception | None = None

    def outcomes(self, combined: Combined) -> list[Tensor | Exception]:
        """Of each visit its rows, or why it has none; raised where it is the only one."""
        if self.error is not None:
            raise self.error
        sizes = [len(call.hidden_states) for call in self.calls]
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


def run_rows(
    rows: Tensor,
    routing: Routing,
    experts: LayerExperts,
    forward: Forward,
    prefetcher: Prefetcher | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``(N, H)``: each row's weighted sum of its experts.

    Args:
        forward: what runs experts.
        prefetcher: hears what is needed, where experts are in a cache.
        add_to: as in `kernels.experts_forward`.

    Raises:
        OffloadError: an expert cannot be read.
    """
    ids, weights = routing.expert_ids, routing.weights
    if isinstance(experts, OffloadedExperts):
        return experts.forward(rows, ids, weights, forward, prefetcher, add_to)
    return forward(rows, ids, weights, experts, add_to)


def serve(
    dispatched: Dispatched,
    experts: LayerExperts,
    forward: Forward,
    prefetcher: Prefetcher | None = None,
) -> tuple[Tensor, dict[int, Failure]]:
    """Results of all rows, and which of them have none and why.

    Where results go to other ranks nothing is raised: they wait for an answer.
    """
    rows, routing = dispatched.hidden_states, dispatched.routing
    distributed = dispatched.distributed
    dtype = sum_dtype(held_experts(experts)) if distributed else rows.dtype

    def run(rows: Tensor, routing: Routing, prefetcher: Prefetcher | None) -> Tensor:
        wider = dtype != rows.dtype or not len(rows)
        add_to = rows.new_zeros(rows.shape, dtype=dtype) if distributed and wider else None
        return run_rows(rows, routing, experts, forward, prefetcher, add_to)

    try:
        return run(rows, routing, prefetcher), {}
    except OffloadError as error:
        failures = _lost(experts, routing, error)
    except Exception as error:
        if not distributed:
            raise
        # Here, as the request fails on another rank; without the message, which may quote a client.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _logger.error("experts failed: %s\n%s", type(error).__name__, frames)
        fault = Failure(f"{type(error).__name__}: {error}", unreadable=False)
        failures = dict.fromkeys(range(len(rows)), fault)
    results = rows.new_zeros(rows.shape, dtype=dtype)
    left = torch.tensor([row for row in range(len(rows)) if row not in failures], dtype=torch.int64)
    try:
        some = Routing(routing.expert_ids[left], routing.weights[left])
        results[left] = run(rows[left], some, None)  # forecasts are for all rows of the step
    except OffloadError as error:
        failures |= dict.fromkeys(left.tolist(), Failure(str(error), unreadable=True))
    return results, failures


def _lost(experts: LayerExperts, routing: Routing, error: OffloadError) -> dict[int, Failure]:
    """The rows whose experts cannot be read."""
    ids = routing.expert_ids.tolist()
    if not isinstance(experts, OffloadedExperts):
        return dict.fromkeys(range(len(ids)), Failure(str(error), unreadable=True))
    wanted = sorted({expert for row in ids for expert in row if expert >= 0})
    lost = experts.unreadable(wanted)
    reasons = {row: [lost[e] for e in row_ids if e in lost] for row, row_ids in enumerate(ids)}
    return {row: Failure(str(found[0]), True) for row, found in reasons.items() if found}


# ---- Ranks meet at every MoE layer that any of them visits, also those that have nothing there.


class Pass:
    """One pass of all ranks through the MoE layers.

    Args:
        layers: that any rank visits; the same on every rank.
        join: meets the others at a layer, with no tokens of its own.
    """

    def __init__(self, layers: Iterable[int], join: Callable[[int], None]) -> None:
        self._ahead = sorted(set(layers), reverse=True)
        self._join = join

    @property
    def left(self) -> int:
        """Layers where the others have not been met yet."""
        return len(self._ahead)

    def reach(self, layer: int) -> None:
        """Join the layers before this one, which the caller is about to visit.

        Raises:
            OffloadError: the others have left this layer, or do not come here: a forward pass that
                failed is begun again.
        """
        if layer not in self._ahead:
            raise OffloadError(
                f"MoE layer {layer} cannot be visited again: the other ranks do not come back to it"
            )
        while (following := self._ahead.pop()) != layer:
            self._join(following)

    def take(self) -> list[int]:
        """The layers that are left, for a caller that will meet the others at each of them."""
        layers, self._ahead = self._ahead[::-1], []
        return layers

    def finish(self) -> None:
        """Join the layers that are left."""
        while self._ahead:
            self._join(self._ahead.pop())


# ----


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Attributes:
        policies: applied to the routings of a layer before its experts run; none at first, as they
            would be in the way of whoever compares ways to compute the model as it is.
        selectors: one a layer where a policy chooses again (`moe.network.routing_policies`), else
        none. dispatcher: brings rows to the experts that serve them; may change between steps.
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
        self.weaken: Callable[[int, ExpertCall], ExpertCall] | None = None
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

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
        """Rows ``(T_i, H)`` of each visit, in its own dtype.

        Where an expert cannot be read, those visits fail that need it: one alone raises
        `OffloadError`, of several each gets its own. Where other ranks are met, a pass cannot be
        begun again without them: then the rows concerned are zeros, and `Visit.lost` says why.
        """
        if self.everybody is not None:
            self.everybody.reach(layer)
        brought = self.bring(layer, calls)
        if self.dispatcher.local and len(calls) == 1:
            experts, rows = self.layers[layer], calls[0].hidden_states
            prefetcher = self._prefetcher_for(calls)
            return [run_rows(rows, brought.routing, experts, self.forward, prefetcher)]
        dispatched = self.dispatcher.dispatch(layer, brought.hidden_states, brought.routing)
        prefetcher = self._prefetcher_for(calls) if self.dispatcher.local else None
        rows, failures = serve(dispatched, self.layers[layer], self.forward, prefetcher)
        return brought.outcomes(self.dispatcher.combine(dispatched, rows, failures))

    def bring(self, layer: int, calls: Sequence[ExpertCall]) -> Brought:
        """What visits bring to a layer, after the policies. Where other ranks wait for this one,
        nothing is raised: with an error, it brings nothing."""
        if self.weaken is not None:
            calls = [self.weaken(layer, call) for call in calls]
        experts, here = self.layers[layer], self.dispatcher.local
        selector = self.selectors[layer] if self.selectors else None
        try:
            if calls:
                routing = decide(self.policies, layer, calls, experts, selector)
                self.statistics.record(layer, _by_phase(routing, calls))
                hidden = [call.hidden_states for call in calls]
                joint = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
                return Brought(calls, joint, routing, here)
            error = None
        except Exception as reason:
            if here:
                raise
            error = reason
        nothing, no_rows = torch.empty(0, 1), torch.empty(0, experts.hidden_size)
        return Brought(calls, no_rows, Routing(nothing.long(), nothing), here, error)

    def _prefetcher_for(self, calls: Sequence[ExpertCall]) -> Prefetcher | None:
        """Forecasts are for the sequences of `begin` alone."""
        if self._prefetcher is None:
            return None
        tokens = sum(len(call.hidden_states) for call in calls)
        decode = all(call.phase == "decode" for call in calls)
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


def _by_phase(routing: Routing, calls: Sequence[ExpertCall]) -> dict[Phase, Routing]:
    """The joint routing of the visits, taken apart again by phase."""
    if len(calls) == 1 or len({call.phase for call in calls}) == 1:
        return {calls[0].phase: routing}
    parts = routing.split([call.hidden_states.shape[0] for call in calls])
    return {
        phase: Routing.concat(
            [part for call, part in zip(calls, parts, strict=True) if call.phase == phase]
        )
        for phase in PHASES
    }
