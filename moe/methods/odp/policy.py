"""`OnlineDynamicPruning`: the routing policy of ODP."""

from __future__ import annotations

from dataclasses import dataclass

from routing.policies.base import Arguments, PerLayer, RoutingContext, RoutingPolicy, keep
from routing.routing import Routing


@dataclass(frozen=True)
class OnlineDynamicPruning(RoutingPolicy):
    """Drop slots that weigh less than the layer's ratio of the token's heaviest slot."""

    ratios: PerLayer

    @property
    def spec(self) -> str:
        return f"odp:{self.ratios}"

    @classmethod
    def parse(cls, arguments: list[str]) -> OnlineDynamicPruning:
        rule = "shares in [0, 1], one or one for each MoE layer with commas between"
        wanted = Arguments(arguments, "odp:RATIO", rule)
        return cls(wanted.per_layer(*wanted.parts(1), zero=True))

    def check(self, num_layers: int) -> None:
        self.ratios.check(self.spec, num_layers)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        ratio = self.ratios.of(context.layer)
        return keep(routing, routing.weights >= ratio * routing.weights.amax(1, keepdim=True))
