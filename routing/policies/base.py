"""What a policy is, and the chain that runs several in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from routing.routing import Routing


@dataclass(frozen=True)
class RoutingContext:
    """What a policy may know besides the routing itself.

    Attributes:
        layer: index of the MoE layer, counted over MoE layers only.
        num_experts: E of that layer.
    """

    layer: int
    num_experts: int


class Policy(Protocol):
    """One rewriting rule. ``spec`` is how a profile names it."""

    @property
    def spec(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing: ...


@dataclass(frozen=True)
class PolicyChain:
    """Policies applied left to right; the empty chain is the identity."""

    policies: Sequence[Policy] = ()

    @property
    def lossless(self) -> bool:
        return all(policy.lossless for policy in self.policies)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        for policy in self.policies:
            routing = policy(routing, context)
        return routing
