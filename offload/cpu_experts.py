"""Late experts: of what a GPU lacks, some is computed where it is, while the rest is copied.

An expert of a few rows is one pass over its weights for a processor, and one trip over the bus for
a copy; which takes longer is measured. Processors round activations where GPUs do not, so that this
is for profiles that allow it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import experts_forward
from kernels.reference import AnyExperts
from offload.arena import Arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.pins import Loan
from routing.routing import UNUSED

MANY = 8
"""Rows, and experts, of a trial."""


@dataclass(frozen=True)
class Costs:
    """Seconds, measured.

    Attributes:
        copy: of one expert to the device.
        expert: of one expert on the processor, whatever its rows.
        row: of each row of it.
    """

    copy: float
    expert: float
    row: float

    def computed(self, rows: int) -> float:
        return self.expert + rows * self.row


class LateExperts:
    """Computes experts of one layer from host memory.

    Args:
        layer: MoE layer.
        first: unit of its first expert.
        host: the experts there.
        slots: its slots, as the experts of one layer with this layer's activation.
        costs: what decides.
    """

    def __init__(
        self, layer: int, first: int, host: ExpertCache, slots: AnyExperts, costs: Costs
    ) -> None:
        self.layer, self.host, self.slots = layer, host, slots
        self._first, self.costs = first, costs

    def part(
        self,
        device: ExpertCache,
        wanted: list[int],
        hidden_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Part | None:
        """What of a call is better computed here; None for nothing.

        Args:
            device: the experts there.
            wanted: by the call, ascending.
            ids_TK: on the CPU.
        """
        absent = device.absent(self.layer, wanted)
        if not absent:
            return None
        experts = self.choose(absent, Counter(ids_TK.flatten().tolist()))
        if not experts:
            return None
        is_late_TK = torch.isin(ids_TK, torch.tensor(experts))
        rows_R = is_late_TK.any(1).nonzero()[:, 0]
        mine_RK = ids_TK.masked_fill(~is_late_TK, UNUSED)[rows_R]
        hidden_RH, weights_RK = hidden_TH.cpu()[rows_R], weights_TK.cpu()[rows_R]
        others = [expert for expert in wanted if expert not in experts]
        others_TK = ids_TK.masked_fill(is_late_TK, UNUSED)
        return Part(self, experts, others, others_TK, rows_R, hidden_RH, mine_RK, weights_RK)

    def choose(self, absent: Sequence[int], rows: Mapping[int, int]) -> list[int]:
        """Those that are sooner computed here than copied behind the others; ascending.

        Args:
            absent: ids of experts that the device lacks.
            rows: that visit each.
        """
        there = self.host.resident(self.layer).tolist()
        here, chosen, left = 0.0, [], len(absent)
        values = self.host.policy.values()[self._first :]
        for expert in sorted(absent, key=lambda expert: values[expert]):  # the best shall be copied
            seconds = self.costs.computed(rows[expert])
            if there[expert] and here + seconds < left * self.costs.copy:
                here, left = here + seconds, left - 1
                chosen.append(expert)
        return sorted(chosen)


@dataclass(frozen=True)
class Part:
    """Of a call, what host memory computes. Legend: R rows that visit a late expert.

    Attributes:
        experts: late ones.
        others: that the call needs.
        others_TK: the call's ids without late ones.
    """

    source: LateExperts
    experts: list[int]
    others: list[int]
    others_TK: Tensor
    rows_R: Tensor
    hidden_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor

    def compute(self) -> Tensor:
        """``(T, H)`` on the CPU: the sum over the late experts alone.

        Raises:
            OffloadError: one of them is there no more.
        """
        source, loans = self.source, list[Loan]()
        slots = torch.full((max(self.experts) + 2,), UNUSED)
        try:
            for expert in self.experts:
                loan = source.host.lend(source.layer, expert, urgent=True)
                if loan is None:
                    raise OffloadError(f"expert {expert} of layer {source.layer} was lost")
                loans.append(loan)
                loan.wait()
                slots[expert] = loan.slot
            own_RH = experts_forward(
                self.hidden_RH.float(), slots.take(self.ids_RK), self.weights_RK, source.slots
            )
        finally:
            for loan in loans:
                loan.give_back()
        total_TH = own_RH.new_zeros(len(self.others_TK), own_RH.shape[1])
        total_TH[self.rows_R] = own_RH
        return total_TH


def measure(near: Arena, copy_seconds: float) -> Costs:
    """Costs of one expert, by computing some; before there is anything in the slots.

    Args:
        near: slots in host memory.
    """
    slots, experts = near.experts, min(MANY, near.experts.num_experts)
    for slot in range(experts):  # reading memory that was never written to is faster
        for place in near.places(slot):
            place.zero_()

    def seconds(rows: int) -> float:
        hidden = torch.ones(rows * experts, slots.hidden_size)
        ids = torch.arange(experts).repeat_interleave(rows)[:, None]
        weights, best = torch.ones(ids.shape), float("inf")
        for _ in range(4):
            start = time.perf_counter()
            experts_forward(hidden, ids, weights, slots)
            best = min(best, time.perf_counter() - start)
        return best / experts

    one, many = seconds(1), seconds(MANY)
    row = max(0.0, many - one) / (MANY - 1)
    return Costs(copy_seconds, max(0.0, one - row), row)
