"""Who goes where: routing decisions as values, and pure functions on them.

Ground floor: imports nothing of ours.
"""

from routing.policies import Policy, PolicyChain, RoutingContext, parse_policies
from routing.routing import Routing, RoutingError
from routing.statistics import RoutingStatistics

__all__ = [
    "Policy",
    "PolicyChain",
    "Routing",
    "RoutingContext",
    "RoutingError",
    "RoutingStatistics",
    "parse_policies",
]
