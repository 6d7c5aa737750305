"""`CoreSet`: the experts that the tokens of a draft share. Legend: T rows, E experts, K slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.settings import Profile
from moe.speculate.draft import Kept
from moe.speculate.elastic import first
from routing import Routing
from routing.policies.base import by_expert
from routing.routing import select_top_k

HEAVIEST = 2
"""Experts of each row that the core set of ``seq`` consists of (DES-Seq)."""


@dataclass(frozen=True)
class CoreSet:
    """The draft rule of ``seq``, or with a share that of ``vote``; see `DraftRule`."""

    share: float | None = None

    @classmethod
    def of(cls, profile: Profile) -> CoreSet:
        """Make the rule of a profile."""
        wanted = profile.methods.core_drafts
        return cls(wanted.share if wanted.select == "vote" else None)

    @property
    def name(self) -> str:
        return "seq" if self.share is None else f"vote{self.share:g}"

    def skips(self, layers: int) -> frozenset[int]:
        return frozenset()

    def allowed(
        self, routing: Routing, here_E: Tensor | None, num_experts: int, kept: Kept
    ) -> Tensor | None:
        if self.share is None:
            return heaviest(routing, HEAVIEST, num_experts)
        weights_E = by_expert(routing, routing.weights, num_experts).sum(0)
        if "votes" not in kept:
            kept["votes"] = torch.zeros_like(weights_E)
        return elected(kept["votes"].add_(weights_E), here_E, self.share)


def heaviest(routing: Routing, count: int, num_experts: int) -> Tensor:
    """``(E,)`` bool: the ``count`` heaviest experts of each row."""
    return by_expert(routing, first(routing.weights, count), num_experts).any(0)


def elected(votes_E: Tensor, here_E: Tensor | None, share: float) -> Tensor:
    """``(E,)`` bool: the ``share`` of experts with the most votes, of those ``here``."""
    if here_E is not None:
        votes_E = votes_E.masked_fill(~here_E, -1.0)
    seats = max(1, round(share * len(votes_E)))
    elected_E = torch.zeros(len(votes_E), dtype=torch.bool, device=votes_E.device)
    return elected_E.scatter_(0, select_top_k(votes_E[None], seats)[0], True)
