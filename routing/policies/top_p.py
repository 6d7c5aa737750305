"""``top_p:P``: visit only the heaviest experts whose weights together make the share P (lossy).

A token that is sure of one expert visits few, an undecided one visits all: at equal numbers of
visits less weight is lost than by `top_k`.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.policies.arguments import Arguments
from routing.policies.base import Policy, RoutingContext, keep
from routing.routing import Routing


@dataclass(frozen=True)
class TopP(Policy):
    """Keep each token's heaviest slots, up to the one with which their sum reaches ``share`` of all
    its weight; the kept weights are scaled to the sum of all."""

    share: float

    @property
    def spec(self) -> str:
        return f"top_p:{self.share:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> TopP:
        wanted = Arguments(arguments, "top_p:P", "a share P in (0, 1]")
        return cls(wanted.share(*wanted.parts(1)))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        if self.share == 1:
            return routing
        heaviest = routing.weights.sort(dim=1, descending=True, stable=True)
        before = heaviest.values.cumsum(1) - heaviest.values
        needed = before < self.share * routing.weights.sum(1, keepdim=True)
        return keep(routing, needed.new_zeros(needed.shape).scatter(1, heaviest.indices, needed))
