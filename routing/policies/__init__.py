"""Routing policies: pure functions ``Routing -> Routing``, one file a policy.

A profile lists them as specifications (``"top_k:2"``); `parse_policies` makes a `PolicyChain`.
Each policy declares whether it is lossless: a lossless policy may move tokens between replicas or
reorder slots, and never changes what the layer computes.
"""

from routing.policies.base import Policy, PolicyChain, RoutingContext
from routing.policies.registry import parse_policies

__all__ = ["Policy", "PolicyChain", "RoutingContext", "parse_policies"]
