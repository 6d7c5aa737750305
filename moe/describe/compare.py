"""Do two ways of reading the same tokens agree: in logits, expert choices, weights and caches?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from moe.describe.description import NotDescribed
from moe.describe.packing import QUANTIZED as QUANTIZED_VALUES
from moe.describe.packing import stand_in
from moe.network.kv_cache import SequenceKV
from moe.network.lanes import ExpertCall
from routing import Routing


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may differ: relative to the largest value; experts as a share of choices.

    Attributes:
        noise: what rounding alone makes of parts of a run; up to three times as much is allowed.
    """

    values: float
    choices: float
    noise: Mapping[str, Gap] = field(default_factory=dict)

    def allows(self, part: str, gap: Gap) -> bool:
        """False for NaN."""
        least = self.choices if part == _CHOICES else self.values
        noise = self.noise[part].size if part in self.noise else 0.0
        return gap.size <= max(least, _NOISES * noise)


@dataclass(frozen=True)
class Gap:
    """How far one part of two runs differs, and how to say it."""

    size: float
    text: str


EXACT = Tolerance(values=1e-4, choices=0.0)
QUANTIZED = Tolerance(values=QUANTIZED_VALUES, choices=0.1)
ROUNDED = Tolerance(values=1e-4, choices=0.05)
"""With noise of its own beside it; a choice between two nearly equal experts falls either way."""

_NOISES = 3
_CHOICES, _LOGITS = "choices", "logits"


@dataclass
class Run:
    """What one way of reading the tokens gave."""

    caches: list[SequenceKV]
    logits: list[Tensor] = field(default_factory=list)
    routings: list[tuple[int, Routing]] = field(default_factory=list)

    def experts(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        self.routings += [(layer, call.routing) for call in calls]
        return stand_in(layer, calls)

    def routed_experts(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return self.experts(layer, [ExpertCall(layer, rows, routing)])[0]


def compare(theirs: Run, ours: Run, layers: Sequence[int], tolerance: Tolerance) -> float:
    """Largest difference of logits; raises `NotDescribed` for one that is too large."""
    found = gaps(theirs, ours, layers)
    for part, gap in found.items():
        if not tolerance.allows(part, gap):
            raise NotDescribed(gap.text)
    return found[_LOGITS].size


def gaps(theirs: Run, ours: Run, layers: Sequence[int]) -> dict[str, Gap]:
    """How far two runs differ, part by part: routings, caches of these layers, logits.

    Raises:
        NotDescribed: they did not do the same things.
    """
    found = _routing_gaps(theirs.routings, ours.routings)
    for name, part in (("keys", 0), ("values", 1)):
        sizes: list[float] = []
        for mine, other in zip(ours.caches, theirs.caches, strict=True):
            if mine.length != other.length:
                raise NotDescribed(f"a sequence has {mine.length} tokens, not {other.length}")
            sizes += [
                difference(
                    mine.read(layer, mine.length)[part], other.read(layer, mine.length)[part]
                )
                for layer in layers
            ]
        found[name] = _gap(f"cached {name}", *sizes)
    found[_LOGITS] = _gap("logits", difference(torch.cat(ours.logits), torch.cat(theirs.logits)))
    return found


def _routing_gaps(
    theirs: Sequence[tuple[int, Routing]], ours: Sequence[tuple[int, Routing]]
) -> dict[str, Gap]:
    if [layer for layer, _ in theirs] != [layer for layer, _ in ours]:
        raise NotDescribed("other MoE layers are visited")
    rows, wrong, weights = 0, list[int](), dict[int, list[float]]()
    for (layer, expected), (_, actual) in zip(theirs, ours, strict=True):
        order, mine = expected.expert_ids.cpu().sort(1), actual.expert_ids.cpu().sort(1)
        same = (order.values == mine.values).all(1)
        rows += len(same)
        wrong += [layer] * int((~same).sum())
        a = actual.weights.cpu().gather(1, mine.indices)[same]
        b = expected.weights.cpu().gather(1, order.indices)[same]
        weights.setdefault(layer, []).append(difference(a, b) if len(a) else 0.0)
    found = {
        f"weights {layer}": _gap(f"weights of MoE layer {layer}", *sizes)
        for layer, sizes in weights.items()
    }
    if wrong:
        text = f"{len(wrong)} of {rows} choices of experts differ, first in MoE layer {min(wrong)}"
        found[_CHOICES] = Gap(len(wrong) / rows, text)
    return found


def _gap(what: str, *sizes: float) -> Gap:
    size = max(sizes, key=lambda size: inf if isnan(size) else size)
    return Gap(size, f"{what} differ by {size:.1e}")


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; NaN where there is a NaN."""
    actual, expected = actual.float().cpu(), expected.float().cpu()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
