"""The MoE layers of a model: policies, experts and combination for what the lanes brought."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import Forward, experts_forward
from moe.visit import Visit
from offload.errors import OffloadError
from offload.experts import LayerExperts, OffloadedExperts
from offload.prefetch import Prefetcher
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
from routing.predict import NO_TOKEN


class MoELayers:
    """Runs any MoE layer of one model for all lanes that meet there.

    Args:
        layers: experts of each MoE layer.
        policies: applied to the joint routing of a layer before its experts run.
        forward: what runs a layer's experts.
        prefetcher: brings experts nearer that decode steps will need; none where all are in memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        policies: PolicyChain,
        forward: Forward = experts_forward,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.layers = list(layers)
        self.policies = policies
        self._forward = forward
        self._prefetcher, self._decoding = prefetcher, 0
        self.statistics = RoutingStatistics([layer.num_experts for layer in layers])

    @property
    def context(self) -> int:
        """How many of a sequence's last tokens `begin` wants; 0 where nobody looks ahead."""
        return 0 if self._prefetcher is None else self._prefetcher.predictor.context

    def begin(self, contexts: Sequence[Sequence[int]]) -> None:
        """A step begins that decodes these sequences.

        Args:
            contexts: of each, its last `context` tokens or fewer.
        """
        self._decoding = len(contexts)
        if self._prefetcher is not None and contexts:
            tokens = torch.full((len(contexts), self.context), NO_TOKEN)
            for row, ids in zip(tokens, contexts, strict=True):
                row[self.context - len(ids) :] = torch.tensor(ids)
            self._prefetcher.start(tokens)

    def run(self, layer: int, visits: Sequence[Visit]) -> list[Tensor | Exception]:
        """Rows ``(T_i, H)`` of each visit, in its own dtype.

        Where an expert cannot be read, those visits fail that need it: one alone raises
        `OffloadError`, of several each gets its own.
        """
        experts = self.layers[layer]
        routing = Routing.concat([visit.routing for visit in visits])
        routing = self.policies(routing, RoutingContext(layer, experts.num_experts))
        self.statistics.record(layer, _by_phase(routing, visits))
        prefetcher = self._prefetcher
        if routing.num_tokens != self._decoding or any(v.phase != "decode" for v in visits):
            prefetcher = None  # forecasts are for the sequences of `begin` alone
        if len(visits) == 1:
            return [self._run(visits[0].hidden_states, routing, experts, prefetcher)]
        hidden = [visit.hidden_states for visit in visits]
        sizes = [states.shape[0] for states in hidden]
        try:
            rows = self._run(torch.cat(hidden), routing, experts, prefetcher)
            return list(rows.split(sizes))
        except OffloadError:
            parts = zip(hidden, routing.split(sizes), strict=True)
            return [self._run_or_fail(rows, part, experts) for rows, part in parts]

    def _run(
        self,
        rows: Tensor,
        routing: Routing,
        experts: LayerExperts,
        prefetcher: Prefetcher | None = None,
    ) -> Tensor:
        ids, weights = routing.expert_ids, routing.weights
        if isinstance(experts, OffloadedExperts):
            return experts.forward(rows, ids, weights, self._forward, prefetcher)
        return self._forward(rows, ids, weights, experts)

    def _run_or_fail(
        self, rows: Tensor, routing: Routing, experts: LayerExperts
    ) -> Tensor | Exception:
        try:
            return self._run(rows, routing, experts)
        except OffloadError as error:
            return error

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
