"""The rule of a router: from the logits of all experts to the chosen ones and their weights.

Softmax, sigmoid with a selection bias (auxiliary-loss-free balancing), groups (DeepSeek) and
SparseMixer, with or without renormalisation, are settings of one rule.
Legend: T rows, E experts, K experts a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from routing.routing import UNUSED, Routing, select_top_k

Score = Literal["softmax", "sigmoid", "mixer"]
GroupScore = Literal["max", "top2"]

_NEVER = -float("inf")


@dataclass(frozen=True)
class RouterRule:
    """Scores of experts, the choice among them, and the weights of the chosen.

    The rule chooses the ``top_k`` largest of score + correction within the ``groups_kept`` best
    groups (ranked by their largest score, or by the sum of their two largest). Weights are scores
    without correction, divided by their sum if ``renormalise``, times ``scale``, times the expert's
    own ``expert_scale``. A mixer (`_mix`)
    uses the logits themselves, and of the settings only ``top_k``, ``scale`` and its threshold.
    """

    top_k: int
    score: Score = "softmax"
    correction: Tensor | None = None  # (E,) float32
    groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = "max"
    renormalise: bool = False
    scale: float = 1.0
    mixer_threshold: float = 0.0
    expert_scale: Tensor | None = None  # (E,) float32

    @property
    def keeps_order(self) -> bool:
        """Return whether the rule always chooses the experts with the largest logits."""
        return self.correction is None and self.groups == 1

    def scores(self, logits: Tensor) -> Tensor:
        """``(T, E)`` float32 scores of logits ``(T, E)``; weights are made of them."""
        logits = logits.float()
        if self.score == "mixer":
            return logits
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def ranking(self, scores: Tensor, allowed: Tensor | None = None) -> Tensor:
        """``(T, E)`` numbers of which `select` takes the largest; -inf for excluded experts."""
        ranking = scores if self.correction is None else scores + self.correction
        if allowed is not None:
            ranking = ranking.masked_fill(~allowed, _NEVER)
        if self.groups == 1:
            return ranking
        grouped = ranking.unflatten(-1, (self.groups, -1))
        best = grouped.topk(1 if self.group_score == "max" else 2, -1).values
        empty = best[..., 0] == _NEVER
        value = best.masked_fill(best == _NEVER, 0.0).sum(-1).masked_fill(empty, _NEVER)
        kept = torch.zeros_like(empty).scatter(-1, select_top_k(value, self.groups_kept), True)
        return grouped.masked_fill(~kept[..., None], _NEVER).flatten(-2)

    def select(
        self, scores: Tensor, allowed: Tensor | None = None, top_k: int | None = None
    ) -> Routing:
        """The decision for each row of scores.

        Args:
            scores: ``(T, E)`` of `scores`.
            allowed: bool ``(E,)`` or ``(T, E)``: experts that may be chosen; None for all. Groups
                are ranked by their allowed experts; scores do not change. Where fewer than
                ``top_k`` experts are left, slots stay unused.
            top_k: experts a row instead of the rule's own number.
        """
        count = min(self.top_k if top_k is None else top_k, scores.shape[-1])
        if self.score == "mixer":
            return self._mix(scores, allowed, count)
        ranking = self.ranking(scores, allowed)
        ids = select_top_k(ranking, count)
        unused = ranking.gather(-1, ids) == _NEVER
        weights = scores.gather(-1, ids).masked_fill(unused, 0.0)
        if self.renormalise:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.where(total != 0, 1.0)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        return Routing(ids.masked_fill(unused, UNUSED), weights * self.scale).ascending()

    def _mix(self, logits: Tensor, allowed: Tensor | None, count: int) -> Routing:
        """SparseMixer (arXiv 2409.12136): take the largest logit left, ``count`` times; its weight
        is a softmax over the logits left that are within the threshold of it."""
        left = logits if allowed is None else logits.masked_fill(~allowed, _NEVER)
        ids, weights = [], []
        for _ in range(count):
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > self.mixer_threshold
            probabilities = left.masked_fill(far, _NEVER).softmax(-1)
            none = best == _NEVER
            ids.append(index.masked_fill(none, UNUSED))
            weights.append(probabilities.gather(-1, index).masked_fill(none, 0.0))
            left = left.scatter(-1, index, _NEVER)
        return Routing(torch.cat(ids, -1), torch.cat(weights, -1) * self.scale).ascending()
