"""Who goes where: routing decisions as values, and pure functions on them.

Ground floor: imports nothing of ours.
"""

from routing.policies import Need, Policy, PolicyChain, RoutingContext, parse_policies
from routing.routing import Routing, RoutingError
from routing.statistics import PHASES, READERS, Phase, Reader, RoutingStatistics

__all__ = [
    "PHASES",
    "READERS",
    "Need",
    "Phase",
    "Policy",
    "PolicyChain",
    "Reader",
    "Routing",
    "RoutingContext",
    "RoutingError",
    "RoutingStatistics",
    "parse_policies",
]
