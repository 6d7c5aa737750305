"""Do two ways of reading the same tokens agree: in logits, expert choices, weights and caches?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe.fused.description import NotDescribed
from moe.fused.observe import stand_in
from moe.kv import SequenceKV
from moe.visit import Visit
from routing import Routing


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may differ: relative to the largest value; experts as a share of choices."""

    values: float
    choices: float


EXACT = Tolerance(values=1e-4, choices=0.0)
QUANTIZED = Tolerance(values=3e-2, choices=0.1)


@dataclass
class Run:
    """What one way of reading the tokens gave."""

    caches: list[SequenceKV]
    logits: list[Tensor] = field(default_factory=list)
    routings: list[tuple[int, Routing]] = field(default_factory=list)

    def experts(self, layer: int, visits: Sequence[Visit]) -> list[Tensor]:
        self.routings += [(layer, visit.routing) for visit in visits]
        return stand_in(layer, visits)

    def visit(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return self.experts(layer, [Visit(layer, rows, routing)])[0]


def compare(theirs: Run, ours: Run, layers: Sequence[int], tolerance: Tolerance) -> float:
    """Largest difference of logits; raises `NotDescribed` for one that is too large."""
    _compare_routings(theirs.routings, ours.routings, tolerance)
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        if mine.length != other.length:
            raise NotDescribed(f"a sequence has {mine.length} tokens, not {other.length}")
        for layer in layers:
            pairs = zip(mine.read(layer, mine.length), other.read(layer, mine.length), strict=True)
            for part, (a, b) in zip(("keys", "values"), pairs, strict=True):
                if not difference(a, b) <= tolerance.values:
                    raise NotDescribed(f"cached {part} differ by {difference(a, b):.1e}")
    worst = difference(torch.cat(ours.logits), torch.cat(theirs.logits))
    if not worst <= tolerance.values:
        raise NotDescribed(f"logits differ by {worst:.1e}")
    return worst


def _compare_routings(
    theirs: Sequence[tuple[int, Routing]], ours: Sequence[tuple[int, Routing]], tolerance: Tolerance
) -> None:
    if [layer for layer, _ in theirs] != [layer for layer, _ in ours]:
        raise NotDescribed("other MoE layers are visited")
    rows, wrong = 0, []
    for (layer, expected), (_, actual) in zip(theirs, ours, strict=True):
        order, mine = expected.expert_ids.sort(1), actual.expert_ids.sort(1)
        same = (order.values == mine.values).all(1)
        rows += len(same)
        wrong += [layer] * int((~same).sum())
        a = actual.weights.gather(1, mine.indices)[same]
        b = expected.weights.gather(1, order.indices)[same]
        if len(a) and not difference(a, b) <= tolerance.values:
            raise NotDescribed(f"weights of MoE layer {layer} differ by {difference(a, b):.1e}")
    if len(wrong) > tolerance.choices * rows:
        raise NotDescribed(
            f"{len(wrong)} of {rows} choices of experts differ, first in MoE layer {min(wrong)}"
        )


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; NaN where there is a NaN."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
