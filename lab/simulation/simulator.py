"""Many ranks in one process: a discrete-event simulation of decode steps under expert parallelism.

A step is, for each lane (micro-batch) and each layer: attention, rows to the ranks that serve them,
experts, results back. A rank computes one thing at a time and exchanges one thing at a time; two
lanes let the one run under the other. A piece of work begins when what it needs is there. An
exchange ends on a rank when all others have sent everything and its own links have taken all in.

Legend: R ranks, B tokens, K experts each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement import Placement
from lab.simulation.costs import Costs, Floats, Network
from moe.commands.plan.ranks import StepTraffic, step_traffic

Ints = NDArray[np.int64]

ATTENTION, DISPATCH, EXPERTS, COMBINE = range(4)


@dataclass(frozen=True)
class Lane:
    """A micro-batch.

    Attributes:
        tokens_R: that each rank brings.
        layers: what is sent and served; a model with more layers goes through them in turn.
    """

    tokens_R: Ints
    layers: Sequence[StepTraffic]


@dataclass(frozen=True)
class Simulated:
    """One step.

    Attributes:
        seconds: until the last rank is through.
        idle: share of them in which the mean rank computes nothing.
        imbalance: the heaviest rank's slots over the mean, mean over layers.
        bytes_a_token: exchanged between different ranks, all layers.
    """

    seconds: float
    idle: float
    imbalance: float
    bytes_a_token: float


def lanes_of(layers: Sequence[Ints], placements: Sequence[Placement], lanes: int) -> list[Lane]:
    """Tokens are dealt evenly to lanes and to ranks.

    Args:
        layers: ``(B, K)`` expert ids of each layer.
        placements: of each layer.
    """
    made = []
    for first in range(lanes):
        parts = [experts_TK[first::lanes] for experts_TK in layers]
        ranks, tokens = placements[0].ranks, len(parts[0])
        source_T = np.arange(tokens) * ranks // tokens
        traffic = [
            step_traffic(experts_TK, source_T, placement)
            for experts_TK, placement in zip(parts, placements, strict=True)
        ]
        made.append(Lane(np.bincount(source_T, minlength=ranks), traffic))
    return made


def simulate(lanes: Sequence[Lane], layers: int, costs: Costs, network: Network) -> Simulated:
    """Run one step of a model with so many MoE layers."""
    run = _Run(lanes, layers, costs, network)
    run.go()
    tokens = sum(int(lane.tokens_R.sum()) for lane in lanes)
    served = np.array([[step.served_R for step in lane.layers] for lane in lanes]).sum(0)
    end = run.done_R.max()
    return Simulated(
        seconds=float(end + costs.step_s),
        idle=float(1 - run.busy_R.mean() / end),
        imbalance=float((served.max(1) / served.mean(1)).mean()),
        bytes_a_token=run.bytes / tokens,
    )


class _Run:
    """The state of a simulation: events are moments at which a rank's lane is ready to go on."""

    def __init__(self, lanes: Sequence[Lane], layers: int, costs: Costs, network: Network) -> None:
        self.lanes, self.costs, self.network = lanes, costs, network
        self.ranks = len(lanes[0].tokens_R)
        self.done_R, self.busy_R, self.bytes = np.zeros(self.ranks), np.zeros(self.ranks), 0.0
        self._stages = 4 * layers
        self._computing_R, self._exchanging_R = np.zeros(self.ranks), np.zeros(self.ranks)
        self._posted: dict[tuple[int, int], Floats] = {}
        self._events = [
            (0.0, lane, 0, rank) for lane in range(len(lanes)) for rank in range(self.ranks)
        ]
        self._work = {
            (lane, layer, stage): self._seconds(lanes[lane], layer, stage)
            for lane in range(len(lanes))
            for layer in range(len(lanes[0].layers))
            for stage in (ATTENTION, EXPERTS)
        }

    def go(self) -> None:
        heapq.heapify(self._events)
        while self._events:
            time, lane, at, rank = heapq.heappop(self._events)
            layer, stage = divmod(at, 4)
            if at == self._stages:
                self.done_R[rank] = max(self.done_R[rank], time)
            elif stage in (ATTENTION, EXPERTS):
                seconds = self._work[lane, layer % len(self.lanes[lane].layers), stage][rank]
                end = max(time, self._computing_R[rank]) + seconds
                self._computing_R[rank] = end
                self.busy_R[rank] += seconds
                heapq.heappush(self._events, (end, lane, at + 1, rank))
            else:
                self._post(time, lane, at, rank)

    def _post(self, time: float, lane: int, at: int, rank: int) -> None:
        """A rank has come to an exchange; with the last of them it takes place."""
        posted_R = self._posted.setdefault((lane, at), np.full(self.ranks, np.nan))
        posted_R[rank] = time
        if np.isnan(posted_R).any():
            return
        del self._posted[lane, at]
        layer, stage = divmod(at, 4)
        sent_RR = self._bytes(self.lanes[lane].layers[layer % len(self.lanes[lane].layers)], stage)
        start_R = np.maximum(posted_R, self._exchanging_R)
        end_R = self.network.exchange(start_R, sent_RR)
        self._exchanging_R = end_R
        self.bytes += float(sent_RR.sum() - sent_RR.trace())
        for there, end in enumerate(end_R.tolist()):
            heapq.heappush(self._events, (end, lane, at + 1, there))

    def _seconds(self, lane: Lane, layer: int, stage: int) -> Floats:
        """``(R,)`` of computing."""
        costs, step = self.costs, lane.layers[layer]
        if stage == ATTENTION:
            return np.asarray(costs.attention_s + costs.attention_token_s * lane.tokens_R)
        return np.asarray(costs.expert_s * step.distinct_R + costs.slot_s * step.served_R)

    def _bytes(self, step: StepTraffic, stage: int) -> Floats:
        """``(R, R)`` from rank to rank."""
        costs = self.costs
        if stage == DISPATCH:
            return np.asarray(
                (step.slots_RR if costs.out_slots else step.rows_RR) * costs.out_bytes
            )
        return np.asarray(
            (step.slots_RR if costs.back_slots else step.rows_RR).T * costs.back_bytes
        )
