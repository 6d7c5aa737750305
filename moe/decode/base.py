"""What a fused step is, whoever computes it: compiled code, a recording, or plain torch.

It reads a few new tokens of each sequence and gives their logits; routed experts are run by whom it
is told to ask. Legend: B rows, each one new token; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from moe.network.kv_cache import Work
from moe.network.lanes import ExpertCall, ExpertsRunner, call_experts
from routing import Routing

RoutedExperts = Callable[[int, Tensor, Routing], Tensor]
"""Runs the routed experts of one MoE layer: ``(layer, rows, routing) -> rows``."""

StepFunction = Callable[[Sequence[Work], RoutedExperts], list[Tensor]]
"""A step: logits as of `moe.network.backbone.Backbone.lanes`; the visitor runs the experts."""


class Step(Protocol):
    """A step that can run the experts by itself, too."""

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """As `StepFunction`."""

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, and of each MoE layer what was visited: nobody is asked to run experts."""


def through_lane(run_experts: ExpertsRunner) -> RoutedExperts:
    """Brings rows to a model's experts as its own modules do: through the running lane."""

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return call_experts(ExpertCall(layer, rows, routing), run_experts)

    return routed


def read_by(work: Sequence[Work], logits: Tensor) -> list[Tensor]:
    """Each piece's own of ``(B, V)`` logits, once its sequence has grown by its tokens."""
    sizes = [len(item.token_ids) for item in work]
    for item, size in zip(work, sizes, strict=True):
        item.cache.length += size
    parts = logits.split(sizes)
    return [p if item.all_logits else p[-1:] for item, p in zip(work, parts, strict=True)]
