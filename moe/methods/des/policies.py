"""`VoteSharing` and `SequenceSharing`: the routing policies of dynamic expert sharing.

Legend: R runs of N tokens, T tokens, K slots, E experts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from routing.policies.base import (
    Arguments,
    Need,
    PerLayer,
    RoutingContext,
    RoutingPolicy,
    by_expert,
    rescaled,
)
from routing.routing import Routing, select_top_k
from routing.statistics import Phase


@dataclass(frozen=True)
class _ExpertSharing(RoutingPolicy):
    """Runs of at most ``tokens`` tokens of a step share a core set of experts."""

    needs: ClassVar[frozenset[Need]] = frozenset({"select"})
    phases: ClassVar[tuple[Phase, ...]] = ("decode",)

    tokens: int

    @abstractmethod
    def core(self, weights_RNE: Tensor, top_k: int, layer: int) -> Tensor:
        """``(R, E)`` bool: each run's core set. ``weights_RNE`` is 0 for experts not chosen."""

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        assert context.select is not None
        if routing.num_tokens == 0:
            return routing
        size = min(self.tokens, routing.num_tokens)
        weights_TE = by_expert(routing, routing.weights, context.num_experts)
        padded = torch.nn.functional.pad(weights_TE, (0, 0, 0, -len(weights_TE) % size))
        core_RE = self.core(padded.unflatten(0, (-1, size)), routing.top_k, context.layer)
        allowed_TE = core_RE.repeat_interleave(size, 0)[: routing.num_tokens]
        chosen = context.select(allowed_TE, routing.top_k)
        # Without this, a router that does not renormalise would give less total weight.
        return Routing(chosen.expert_ids, rescaled(chosen.weights, routing.weights))


@dataclass(frozen=True)
class VoteSharing(_ExpertSharing):
    """The core set is the share of all experts with most votes from the run's tokens, and never
    fewer than a token visits. A token's vote for an expert is its weight to the ``power``: 1 in the
    paper; 2 gives more say to tokens that prefer one expert clearly.
    """

    shares: PerLayer
    power: float = 1.0

    @property
    def spec(self) -> str:
        power = "" if self.power == 1 else f":{self.power:g}"
        return f"des_vote:{self.shares}:{self.tokens}{power}"

    @classmethod
    def parse(cls, arguments: list[str]) -> VoteSharing:
        rule = (
            "shares in (0, 1] of the experts (one, or one for each MoE layer with commas between), "
            "and whole numbers >= 1"
        )
        wanted = Arguments(arguments, "des_vote:SHARE:TOKENS[:POWER]", rule)
        shares, tokens, power = wanted.parts(3, "1")
        return cls(wanted.whole(tokens), wanted.per_layer(shares), float(wanted.whole(power)))

    def check(self, num_layers: int) -> None:
        self.shares.check(self.spec, num_layers)

    def core(self, weights_RNE: Tensor, top_k: int, layer: int) -> Tensor:
        votes_RE = (weights_RNE**self.power).sum(1)
        count = max(math.ceil(self.shares.of(layer) * votes_RE.shape[1]), top_k)
        chosen = select_top_k(votes_RE, min(count, votes_RE.shape[1]))
        return torch.zeros_like(votes_RE, dtype=torch.bool).scatter(1, chosen, True)


@dataclass(frozen=True)
class SequenceSharing(_ExpertSharing):
    """The core set joins the ``top_k`` heaviest experts of each of the run's tokens."""

    top_k: int

    @property
    def spec(self) -> str:
        return f"des_seq:{self.top_k}:{self.tokens}"

    @classmethod
    def parse(cls, arguments: list[str]) -> SequenceSharing:
        wanted = Arguments(arguments, "des_seq:K:TOKENS", "whole numbers >= 1")
        top_k, tokens = wanted.parts(2)
        return cls(wanted.whole(tokens), wanted.whole(top_k))

    def core(self, weights_RNE: Tensor, top_k: int, layer: int) -> Tensor:
        count = min(self.top_k, weights_RNE.shape[-1])
        best = select_top_k(weights_RNE.flatten(0, 1), count)
        wanted = torch.zeros_like(weights_RNE, dtype=torch.bool).flatten(0, 1)
        wanted = wanted.scatter(1, best, True).view_as(weights_RNE) & (weights_RNE > 0)
        return wanted.any(1)
