"""A layer's router as a value that can choose again: what policies and drafts restrict.

`moe.selection` finds it. Legend: T rows, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from routing import Routing
from routing.routers import RouterRule


@dataclass(frozen=True)
class Selector:
    """The router of one MoE layer, for the rows that reach its experts."""

    weight: Tensor  # (E, H); the model's own
    bias: Tensor | None  # (E,)
    rule: RouterRule

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """``(T, E)`` float32 of rows ``(T, H)``: what weights are made of (`RouterRule`)."""
        return self.rule.scores(linear(hidden.float(), self.weight.float(), self.bias))

    @torch.inference_mode()
    def select(
        self, scores: Tensor, allowed: Tensor | None = None, top_k: int | None = None
    ) -> Routing:
        """The router's decision, or what it would be among ``allowed`` experts, ``top_k`` of them:
        see `RouterRule.select`. Weights are not scaled up for what is left out, unless the router
        itself renormalises."""
        return self.rule.select(scores, allowed, top_k)


@dataclass(frozen=True)
class FoundSelector:
    """What is known of one MoE layer's router; ``reason`` says why there is no selector."""

    selector: Selector | None
    reason: str = ""
