"""Routing policies: pure functions from a `Routing` to a `Routing`.

A profile lists them as specifications (``"top_k:2"``); `parse_policies` makes a `PolicyChain` of
them. Each policy declares whether it is lossless: a lossless policy never changes what the layer
computes. It also declares what it needs to know beyond the routing (`Need`), so that nothing is
computed that no policy asks for. pruning.py has the plain ones; callers bring those of papers as
`MorePolicies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Protocol

from routing.policies.base import Need, PolicyChain, RoutingContext, RoutingPolicy
from routing.policies.pruning import TopK, TopP
from routing.routing import RoutingError

__all__ = [
    "MorePolicies",
    "Need",
    "ParsePolicy",
    "PolicyChain",
    "RoutingContext",
    "RoutingPolicy",
    "parse_policies",
]

ParsePolicy = Callable[[list[str]], RoutingPolicy]
"""Makes a policy of the arguments of its specification; raises `RoutingError` for bad ones."""

_POLICIES: dict[str, ParsePolicy] = {"top_k": TopK.parse, "top_p": TopP.parse}


class MorePolicies(Protocol):
    """Policies beside our own, by the names that specifications begin with."""

    def names(self) -> Sequence[str]: ...

    def find(self, name: str) -> ParsePolicy | None: ...


def parse_policies(
    specs: Sequence[str], *, lossless: bool, more: MorePolicies | None = None
) -> PolicyChain:
    """Build the chain that a profile asks for.

    Args:
        specs: ``"NAME[:ARGUMENT...]"`` each, applied in this order.
        lossless: the profile's promise; lossy policies are refused under it.
        more: policies beside ``top_k`` and ``top_p``.

    Raises:
        RoutingError: unknown name, bad arguments, or a lossy policy under ``lossless: true``.
    """
    policies = []
    for spec in specs:
        name, *arguments = spec.split(":")
        parse = _POLICIES.get(name)
        if parse is None and more is not None:
            parse = more.find(name)
        if parse is None:
            known = sorted([*_POLICIES, *([] if more is None else more.names())])
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise RoutingError(f"unknown policy '{name}' (known: {', '.join(known)}){hint}")
        policy = parse(arguments)
        if lossless and not policy.lossless:
            raise RoutingError(
                f"policy '{policy.spec}' changes the model's output, and the profile says "
                "lossless: true; remove the policy or set lossless: false"
            )
        policies.append(policy)
    return PolicyChain(tuple(policies))
