"""Routing policies: pure functions from a `Routing` to a `Routing`.

A profile lists them as specifications (``"top_k:2"``); `parse_policies` makes a `PolicyChain` of
them. Each policy declares whether it is lossless: a lossless policy never changes what the layer
computes. It also declares what it needs to know beyond the routing (`Need`), so that nothing is
computed that no policy asks for. pruning.py has the policies that drop experts, reuse.py those that
make tokens choose experts that others chose or that are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from routing.policies.base import Need, PolicyChain, RoutingContext, RoutingPolicy
from routing.policies.pruning import OnlineDynamicPruning, PrefillSkipping, TopK, TopP
from routing.policies.reuse import PreferResident, SequenceSharing, VoteSharing
from routing.routing import RoutingError

__all__ = ["POLICIES", "Need", "PolicyChain", "RoutingContext", "RoutingPolicy", "parse_policies"]

POLICIES: dict[str, Callable[[list[str]], RoutingPolicy]] = {
    "des_seq": SequenceSharing.parse,
    "des_vote": VoteSharing.parse,
    "odp": OnlineDynamicPruning.parse,
    "pesf": PrefillSkipping.parse,
    "resident": PreferResident.parse,
    "top_k": TopK.parse,
    "top_p": TopP.parse,
}


def parse_policies(specs: Sequence[str], *, lossless: bool) -> PolicyChain:
    """Build the chain that a profile asks for.

    Args:
        specs: ``"NAME[:ARGUMENT...]"`` each, applied in this order.
        lossless: the profile's promise; lossy policies are refused under it.

    Raises:
        RoutingError: unknown name, bad arguments, or a lossy policy under ``lossless: true``.
    """
    policies = []
    for spec in specs:
        name, *arguments = spec.split(":")
        if name not in POLICIES:
            near = get_close_matches(name, POLICIES, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            known = ", ".join(sorted(POLICIES))
            raise RoutingError(f"unknown policy '{name}' (known: {known}){hint}")
        policy = POLICIES[name](arguments)
        if lossless and not policy.lossless:
            raise RoutingError(
                f"policy '{policy.spec}' changes the model's output, and the profile says "
                "lossless: true; remove the policy or set lossless: false"
            )
        policies.append(policy)
    return PolicyChain(tuple(policies))
