"""Routing policies: pure functions ``Routing -> Routing``, one file a policy.

A profile lists them as specifications (``"top_k:2"``); `parse_policies` makes a `PolicyChain`.
Each policy declares whether it is lossless: a lossless policy may move tokens between replicas or
reorder slots, and never changes what the layer computes. It also declares what it needs to know
beyond the routing (`Need`), so that nothing is computed that no policy asks for.
"""

from routing.policies.base import Need, Policy, PolicyChain, RoutingContext
from routing.policies.registry import parse_policies

__all__ = ["Need", "Policy", "PolicyChain", "RoutingContext", "parse_policies"]
