"""Rows at an MoE layer: what visits bring, and what a dispatcher brings run through the experts of
this rank, which are all where there is no other.

What cannot be had costs only the rows that need it: they are found by their experts, and the others
are run again.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.dispatch import Combined, Dispatched, Failure
from kernels import Forward
from kernels.reference import sum_dtype
from moe.visit import Visit
from offload.errors import OffloadError
from offload.experts import LayerExperts, OffloadedExperts, held_experts
from offload.prefetch import Prefetcher
from routing import Routing

_logger = logging.getLogger("moe")


@dataclass
class Brought:
    """Tokens of all visits at a layer.

    Attributes:
        visits: that brought them.
        hidden_states: ``(T, H)`` of all of them.
        routing: after the policies.
        local: no other rank is concerned.
        error: why there are no tokens although there are visits.
    """

    visits: Sequence[Visit]
    hidden_states: Tensor
    routing: Routing
    local: bool
    error: Exception | None = None

    def outcomes(self, combined: Combined) -> list[Tensor | Exception]:
        """Of each visit its rows, or why it has none; raised where it is the only one."""
        if self.error is not None:
            raise self.error
        sizes = [len(visit.hidden_states) for visit in self.visits]
        rows: list[Tensor | Exception] = list(combined.rows.split(sizes))
        if not combined.failures:
            return rows
        owner = [(at, row) for at, size in enumerate(sizes) for row in range(size)]
        for token, failure in combined.failures.items():
            at, row = owner[token]
            if self.local:
                rows[at] = OffloadError(failure.reason)
            else:
                self.visits[at].lost[row] = failure
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
    rows, routing, apart = dispatched.hidden_states, dispatched.routing, dispatched.apart
    dtype = sum_dtype(held_experts(experts)) if apart else rows.dtype

    def run(rows: Tensor, routing: Routing, prefetcher: Prefetcher | None) -> Tensor:
        wider = dtype != rows.dtype or not len(rows)
        add_to = rows.new_zeros(rows.shape, dtype=dtype) if apart and wider else None
        return run_rows(rows, routing, experts, forward, prefetcher, add_to)

    try:
        return run(rows, routing, prefetcher), {}
    except OffloadError as error:
        failures = _lost(experts, routing, error)
    except Exception as error:
        if not apart:
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
