"""Routing: which experts each token visits, as values and pure functions on them.

`RouterRule` turns a router's logits into a `Routing`: expert ids and weights of each token's slots.
A `RoutingPolicy` maps a `Routing` to a `Routing`; `parse_policies` makes the `PolicyChain` that a
profile lists. `RoutingStatistics` counts what the routers chose; routing/predict guesses routings
ahead of time.
"""

from routing.policies import Need, PolicyChain, RoutingContext, RoutingPolicy, parse_policies
from routing.routing import Routing, RoutingError
from routing.statistics import LOADED_FOR, PHASES, LoadedFor, Phase, RoutingStatistics

__all__ = [
    "LOADED_FOR",
    "PHASES",
    "LoadedFor",
    "Need",
    "Phase",
    "PolicyChain",
    "Routing",
    "RoutingContext",
    "RoutingError",
    "RoutingPolicy",
    "RoutingStatistics",
    "parse_policies",
]
