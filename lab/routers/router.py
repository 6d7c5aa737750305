"""The laboratory's router module: logits of rows, then the configured rule of `routers`.

Legend: T rows, H hidden, E experts, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lab.routers.configuration import LabConfig
from lab.routers.routers import (
    balanced_routing,
    mixed_scores,
    relu_routing,
    sinkhorn,
    size_routing,
)
from routing import Routing
from routing.routers import RouterRule
from routing.routing import UNUSED

Mix = Callable[[Tensor], Tensor]
"""From each row's scores ``(T, E)``, those that earlier tokens contribute to it."""


class LabRouter(nn.Module):
    """Decides once for each layer, or once for all layers."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        self.n_group, self.topk_group = config.n_group, config.topk_group
        rows = 3 if config.router == "sizes" else config.num_experts
        self.weight = nn.Parameter(torch.zeros(rows, config.hidden_size))
        if config.router == "relu":
            self.scale = nn.Parameter(torch.ones(config.num_experts))
        if config.selection_bias:
            self.bias = nn.Buffer(torch.zeros(config.num_experts))

    def forward(self, rows: Tensor, mix: Mix | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(T, E)`` (with neighbours, what would give their mixture), weights and ids
        ``(T, K)``; the id E marks an unused slot.

        Args:
            rows: ``(T, H)``.
            mix: neighbours' scores, where they take part.
        """
        logits = linear(rows.float(), self.weight.float())
        if mix is not None:
            scores = self.rule.scores(logits)
            mixed = mixed_scores(scores, mix(scores), self.config.neighbour_share)
            logits = mixed.log() if self.config.router == "softmax" else mixed.logit()
        routing = self._decide(logits)
        ids = routing.expert_ids.masked_fill(routing.expert_ids == UNUSED, self.num_experts)
        return logits, routing.weights.to(rows.dtype), ids

    @property
    def rule(self) -> RouterRule:
        """The rule of softmax and sigmoid routers."""
        config = self.config
        return RouterRule(
            config.num_experts_per_tok,
            "sigmoid" if config.router == "sigmoid" else "softmax",
            self.bias if config.selection_bias else None,
            config.n_group,
            config.topk_group,
            "top2" if config.group_score == "top2" else "max",
            config.norm_topk_prob,
        )

    def _decide(self, logits: Tensor) -> Routing:
        config = self.config
        if config.router == "relu":
            return relu_routing(logits, self.scale)
        if config.router == "sizes":
            return self._size(logits)
        if self.training and float(torch.rand(())) < config.sinkhorn_share:
            plan = sinkhorn(logits.detach(), config.sinkhorn_temperature)
            chosen = balanced_routing(plan, config.num_experts_per_tok).expert_ids
            allowed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
            return self.rule.select(self.rule.scores(logits), allowed)
        return self.rule.select(self.rule.scores(logits))

    def _size(self, logits: Tensor) -> Routing:
        """Big, small or none; in training with Gumbel noise, and a weight that passes gradients."""
        if self.training:
            uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            logits = logits - (-uniform.log()).log()
        probabilities = logits.softmax(-1)
        chosen = logits.argmax(-1)
        weight = probabilities.gather(-1, chosen[:, None])[:, 0]
        small = self.num_experts - 1
        return size_routing(chosen, 1 + weight - weight.detach(), [range(small), [small], []])
