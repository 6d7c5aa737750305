"""What ranks send and serve, counted on routing decisions: the ground of forecasts for many ranks.

Legend: S steps, L layers, B tokens of a step, K experts each, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.dispatch.assignment import serve
from experts.placement import Placement
from moe.plan.decode_speed import Sizes

Ints = NDArray[np.int64]

STEPS, LAYERS = 24, 4
"""Most steps and layers that are looked at."""


@dataclass(frozen=True)
class StepTraffic:
    """Of one layer in one step.

    Attributes:
        rows_RR: tokens of each rank that go to each rank, the own one included.
        slots_RR: their slots that are served there.
        distinct_R: experts that each rank reads.
    """

    rows_RR: Ints
    slots_RR: Ints
    distinct_R: Ints

    @property
    def served_R(self) -> Ints:
        """Slots that each rank serves: its load."""
        return np.asarray(self.slots_RR.sum(0))


def step_traffic(experts_TK: Ints, source_T: Ints, placement: Placement) -> StepTraffic:
    """As the dispatcher does it: copies chosen for the loads of all ranks together.

    Args:
        experts_TK: expert ids, -1 for unused slots.
        source_T: the rank of each token, ascending.
    """
    experts, ranks = placement.num_experts, placement.ranks
    loads_E = np.bincount(experts_TK.reshape(-1) + 1, minlength=experts + 1)[1:]
    serving_TK = serve(experts_TK, loads_E, source_T, placement)
    token, slot = (serving_TK >= 0).nonzero()
    slots_TR = np.zeros((len(experts_TK), ranks), np.int64)
    np.add.at(slots_TR, (token, serving_TK[token, slot]), 1)
    rows_RR, slots_RR = np.zeros((2, ranks, ranks), np.int64)
    np.add.at(rows_RR, source_T, (slots_TR > 0).astype(np.int64))
    np.add.at(slots_RR, source_T, slots_TR)
    read_ER = np.zeros((experts, ranks), bool)
    read_ER[experts_TK[token, slot], serving_TK[token, slot]] = True
    return StepTraffic(rows_RR, slots_RR, read_ER.sum(0))


@dataclass(frozen=True)
class Traffic:
    """Means over layers and steps.

    Attributes:
        pairs: other ranks that a token goes to: each a row out, and a row back if results are
            summed there.
        slots: of a token, those served on other ranks: rows back if results are summed at home.
        imbalance: the heaviest rank's slots over the mean.
        distinct: experts that the rank reads which reads most.
        distinct_all: experts that all ranks read, copies counted.
    """

    pairs: float
    slots: float
    imbalance: float
    distinct: float
    distinct_all: float


def traffic(placements: Sequence[Placement], steps_SLBK: Ints) -> Traffic:
    """Of steps whose tokens are dealt evenly to ranks.

    Args:
        placements: of each layer.
        steps_SLBK: expert ids.
    """
    batch = steps_SLBK.shape[2]
    source = np.arange(batch) * placements[0].ranks // batch
    found = []
    for layer, placement in enumerate(placements):
        for experts_TK in steps_SLBK[:, layer]:
            step = step_traffic(experts_TK, source, placement)
            served_R = step.served_R
            away = [
                int(matrix.sum() - matrix.trace()) / batch
                for matrix in (step.rows_RR, step.slots_RR)
            ]
            uneven = served_R.max() / served_R.mean()
            found.append((*away, uneven, step.distinct_R.max(), step.distinct_R.sum()))
    return Traffic(*np.mean(found, axis=0).tolist())


def drawn_steps(sizes: Sizes, batch: int) -> Ints:
    """``(S, L, B, K)`` where every expert is as likely as any other."""
    rng = np.random.default_rng(0)
    width = max(round(sizes.top_k), 1)
    keys = rng.random((STEPS, min(sizes.layers, LAYERS), batch, sizes.experts))
    return np.argpartition(keys, width - 1, axis=3)[..., :width]


def loads_of(steps_SLBK: Ints, num_experts: int) -> list[NDArray[np.float64]]:
    """Of each layer ``(S, E)`` tokens of each expert in each step."""
    counts = []
    for layer in range(steps_SLBK.shape[1]):
        steps = [ids[ids >= 0] for ids in steps_SLBK[:, layer]]
        counts.append(np.array([np.bincount(ids, minlength=num_experts) for ids in steps], float))
    return counts
