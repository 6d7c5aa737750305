"""`LeastShare`: imported where a profile has the policy ``at_least:SHARE``."""

from __future__ import annotations

from dataclasses import dataclass

from routing.policies.base import Arguments, RoutingContext, RoutingPolicy, keep
from routing.routing import Routing


@dataclass(frozen=True)
class LeastShare(RoutingPolicy):
    """Keeps the experts of a token that have this share of its weight, and its heaviest."""

    share: float

    @property
    def spec(self) -> str:
        return f"at_least:{self.share:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> LeastShare:
        """Make the policy of the texts behind its name; a bad one is a `RoutingError`."""
        wanted = Arguments(arguments, "at_least:SHARE", "a share in (0, 1]")
        return cls(wanted.share(*wanted.parts(1)))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        weights = routing.weights
        enough = weights >= self.share * weights.sum(1, keepdim=True)
        return keep(routing, enough | (weights == weights.amax(1, keepdim=True)))
