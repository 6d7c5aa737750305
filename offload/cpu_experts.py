"""The CPU computes some experts that a GPU lacks, from host memory, while others are copied.

An expert with few rows takes a CPU one pass over its weights, and a copy one trip over the bus;
`measure_costs` finds out which takes longer. With ``offload.late: host`` the CPU keeps activations,
and only the order of sums differs from the GPU's; ``host_int8`` rounds them to 8 bits, which takes
a third of the time where an expert has many rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels import QuantizedExperts, experts_forward
from kernels.reference import AnyExperts
from offload.arena import Arena
from offload.cache import ExpertCache
from offload.pins import PinnedExperts
from offload.trials import SpeedTrial, try_now
from routing.routing import UNUSED

MANY = 8
"""Rows, and experts, of a trial."""
FLOAT_BITS = 24
"""That a float32 keeps of a number."""


@dataclass(frozen=True)
class CpuCosts:
    """Measured seconds.

    Attributes:
        copy: to copy one expert to the GPU.
        expert: to compute one expert on the CPU, apart from its rows.
        row: more for each row.
    """

    copy: float
    expert: float
    row: float

    def computed(self, rows: int) -> float:
        return self.expert + rows * self.row


class CpuExperts:
    """Computes experts of one layer from host memory.

    Args:
        layer: MoE layer.
        host: the cache in host memory.
        slots: its slots, as the experts of one layer with this layer's activation.
        costs: decide which experts to compute.
    """

    def __init__(self, layer: int, host: ExpertCache, slots: AnyExperts, costs: CpuCosts) -> None:
        self.layer, self.host, self.slots, self.costs = layer, host, slots, costs

    def status(self) -> dict[str, float]:
        """Return its costs, and the bits of an activation, for JSON."""
        kept = self.slots.row_bits if isinstance(self.slots, QuantizedExperts) else FLOAT_BITS
        return {**asdict(self.costs), "row_bits": kept}

    def share(
        self,
        device: ExpertCache,
        wanted: list[int],
        hidden_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> CpuShare | None:
        """Take the part of a call that is better computed here, pinned in host memory; None for
        nothing.

        Args:
            device: the cache of the GPU.
            wanted: the call's experts, ascending.
            hidden_TH, weights_TK: on the CPU, or to be copied there.
            ids_TK: on the CPU.
        """
        absent = device.absent(self.layer, wanted)
        if not absent:
            return None
        experts = self.choose(absent, Counter(ids_TK.flatten().tolist()))
        if not experts:
            return None
        is_own_TK = torch.isin(ids_TK, torch.tensor(experts))
        rows_R = is_own_TK.any(1).nonzero()[:, 0]
        own_RK = ids_TK.masked_fill(~is_own_TK, UNUSED)[rows_R]
        hidden_RH, weights_RK = hidden_TH.cpu()[rows_R], weights_TK.cpu()[rows_R]
        others = [expert for expert in wanted if expert not in experts]
        others_TK = ids_TK.masked_fill(is_own_TK, UNUSED)
        pinned = self.host.acquire(self.layer, experts)
        return CpuShare(
            self.slots, pinned, experts, others, others_TK, rows_R, hidden_RH, own_RK, weights_RK
        )

    def choose(self, absent: Sequence[int], rows: Mapping[int, int]) -> list[int]:
        """Choose the experts that are computed here before they could be copied behind the others,
        as far as they leave room for copies in host memory; ascending.

        Args:
            absent: ids of experts that the GPU lacks.
            rows: number of rows of each expert.
        """
        there = self.host.resident(self.layer).tolist()
        here, chosen, left = 0.0, [], len(absent)
        values = self.host.policy.values()[self.layer * max(self.host.sizes.experts) :]
        for expert in sorted(absent, key=lambda expert: values[expert]):  # copy the most valuable
            seconds = self.costs.computed(rows[expert])
            if there[expert] and here + seconds < left * self.costs.copy:
                here, left = here + seconds, left - 1
                chosen.append(expert)
        return sorted(self.host.may_stay(self.layer, chosen))


@dataclass(frozen=True)
class CpuShare:
    """The part of a call that the CPU computes. Legend: R rows that visit one of its experts.

    A context manager that unpins its experts: what the call copies meanwhile, or reads ahead, goes
    through the same host memory, and would evict them first, as the least valuable there.

    Attributes:
        slots: in host memory, as the experts of one layer.
        pinned: the experts that the CPU computes, there.
        experts: their ids.
        others: that the call needs besides.
        others_TK: the call's ids without `experts`.
    """

    slots: AnyExperts
    pinned: PinnedExperts
    experts: list[int]
    others: list[int]
    others_TK: Tensor
    rows_R: Tensor
    hidden_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor

    def compute(self) -> Tensor:
        """``(T, H)`` on the CPU: the weighted sum over `experts` alone."""
        (ready,) = self.pinned.rounds  # they were there when they were pinned
        slot_ids_RK = ready.slot_ids.take(self.ids_RK)
        own_RH = experts_forward(self.hidden_RH.float(), slot_ids_RK, self.weights_RK, self.slots)
        total_TH = own_RH.new_zeros(len(self.others_TK), own_RH.shape[1])
        total_TH[self.rows_R] = own_RH
        return total_TH

    def __enter__(self) -> CpuShare:
        return self

    def __exit__(self, *_: object) -> None:
        self.pinned.release()


def measure_costs(
    host: Arena, slots: AnyExperts, copy_seconds: float, trial: SpeedTrial = try_now
) -> CpuCosts:
    """Time the CPU on some experts, before there is anything in the slots.

    Args:
        host: slots in host memory.
        slots: the same, as `CpuExperts` has them.
        copy_seconds: see `CpuCosts`.
        trial: times the CPU, or knows how fast it was.
    """
    about: list[object] = [slots.num_experts]
    about += [[place.numel(), str(place.dtype)] for place in host.places(0)]
    if isinstance(slots, QuantizedExperts):
        about += [repr(slots.first), repr(slots.second), slots.parts, slots.row_bits]
    found, _ = trial("processor", about, lambda: _costs(host, slots))
    return CpuCosts(copy_seconds, found["expert"], found["row"])


def _costs(host: Arena, slots: AnyExperts) -> dict[str, float]:
    """Seconds of an expert apart from its rows, and of each row."""
    experts = min(MANY, slots.num_experts)
    for slot in range(experts):  # reading memory that was never written to is faster
        for place in host.places(slot):
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
    return {"expert": max(0.0, one - row), "row": row}
