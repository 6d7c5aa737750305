"""From the specifications in a profile to a chain of policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from routing.policies.base import Policy, PolicyChain
from routing.policies.pruning import OnlineDynamicPruning, PrefillSkipping, TopK, TopP
from routing.policies.resident import Resident
from routing.policies.sharing import Seq, Vote
from routing.routing import RoutingError

POLICIES: dict[str, Callable[[list[str]], Policy]] = {
    "des_seq": Seq.parse,
    "des_vote": Vote.parse,
    "odp": OnlineDynamicPruning.parse,
    "pesf": PrefillSkipping.parse,
    "resident": Resident.parse,
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
