"""Plain policies by which tokens visit fewer experts; both are lossy.

``top_k:N[:keep]`` keeps the N heaviest experts of each token: the baseline for the others.

``top_p:P`` keeps the heaviest experts whose weights together reach the share P. A token sure
of one expert visits few, an undecided one all: at equal numbers of visits it loses less weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.policies.base import Arguments, RoutingContext, RoutingPolicy, keep, rescaled
from routing.routing import UNUSED, Routing, RoutingError, select_top_k


@dataclass(frozen=True)
class TopK(RoutingPolicy):
    """Keep the ``top_k`` heaviest slots of each token.

    With ``renormalise`` the kept weights are scaled to the old sum of all slots; without it the
    dropped weight is missing, as if the experts' outputs were zero.
    """

    top_k: int
    renormalise: bool = True

    @property
    def spec(self) -> str:
        return f"top_k:{self.top_k}" + ("" if self.renormalise else ":keep")

    @classmethod
    def parse(cls, arguments: list[str]) -> TopK:
        """``["2"]`` or ``["2", "keep"]``; anything else is a `RoutingError`."""
        number, *rest = arguments or [""]
        if not number.isdigit() or int(number) < 1 or rest not in ([], ["keep"]):
            raise RoutingError(
                f"policy 'top_k:{':'.join(arguments)}' is not valid; write top_k:N or top_k:N:keep "
                "with a whole number N >= 1"
            )
        return cls(int(number), renormalise=not rest)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        if self.top_k >= routing.top_k:
            return routing
        used = routing.expert_ids != UNUSED
        kept = select_top_k(routing.weights.masked_fill(~used, -float("inf")), self.top_k)
        weights = routing.weights.gather(1, kept)
        if self.renormalise:
            weights = rescaled(weights, routing.weights)
        return Routing(routing.expert_ids.gather(1, kept), weights).ascending()


@dataclass(frozen=True)
class TopP(RoutingPolicy):
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
