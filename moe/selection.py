"""Choosing experts again: a model's own router, so that policies and drafts can restrict it.

What a router multiplies by and chooses by is found by watching one pass and trying
(`moe.fused.router`), whatever the architecture. It is believed where it gives the decisions of that
pass from the rows that reach the experts; elsewhere the layer has no `Selector`, and a reason.
Legend: T rows, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe.errors import ProfileError
from moe.fused.description import NotDescribed, OwnRouter, Router
from moe.fused.observe import Observation, observe_random
from moe.fused.router import describe_router
from moe.seam import experts_modules, layer_of, parents_of
from moe.selector import FoundSelector, Selector
from moe.trunk import Trunk
from routing import PolicyChain, Routing, RoutingError

_TOLERANCE = 1e-4


def find_selectors(trunk: Trunk, seen: Observation | None = None) -> list[FoundSelector]:
    """One entry for each MoE layer.

    Args:
        seen: of `observe_random`; None for a pass of its own. Neither reads any expert.
    """
    seen = seen or observe_random(trunk)
    parents = parents_of(trunk.model)
    layers = zip(experts_modules(trunk.model), blocks(trunk.model), strict=True)
    with torch.inference_mode():
        return [_find([parents[experts], layer], experts, seen) for (_, experts), layer in layers]


def prepare(chain: PolicyChain, trunk: Trunk) -> list[Selector]:
    """What a chain needs of a loaded model; the selector of each MoE layer if a policy chooses
    again.

    Raises:
        ProfileError: a policy is not made for this model, or cannot choose again in it.
    """
    name = type(trunk.model).__name__
    for policy in chain.policies:
        try:
            policy.check(len(experts_modules(trunk.model)))
        except RoutingError as error:
            raise ProfileError(f"routing.policies: {error}") from error
    trunk.watched = "importance" in chain.needs
    if "select" not in chain.needs:
        return []
    found = find_selectors(trunk)
    selectors = [layer.selector for layer in found if layer.selector is not None]
    if len(selectors) < len(found):
        spec = next(policy.spec for policy in chain.policies if "select" in policy.needs)
        index = next(at for at, layer in enumerate(found) if layer.selector is None)
        raise ProfileError(
            f"routing.policies: '{spec}' chooses experts again by the router's own rule, and that "
            f"is not known for {name} (MoE layer {index}: {found[index].reason}); remove the policy"
        )
    return selectors


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layer of each MoE layer; the model itself where it has no list of layers."""
    parents = parents_of(model)
    return [layer_of(experts, parents) for _, experts in experts_modules(model)]


def _find(places: Sequence[nn.Module], experts: Any, seen: Observation) -> FoundSelector:
    call = seen.call(experts)
    if call is None or len(call.tensors) != 3:
        return FoundSelector(None, "its experts are not called once with rows, ids and weights")
    rows, ids, weights = call.tensors
    reason = ""
    for place in dict.fromkeys(places):
        try:
            router = describe_router(place, experts, ids, weights, seen)
        except NotDescribed as error:
            reason = str(error)
        except Exception as error:
            # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
            reason = f"probing raised {type(error).__name__}: {error}"
        else:
            if isinstance(router, OwnRouter):
                reason = "its router follows no rule that is known here"
                continue
            selector = _selector(router)
            made = Routing.from_router(ids, weights, experts.expert_seat.num_experts)
            if _agrees(selector, rows, made):
                return FoundSelector(selector)
            return FoundSelector(None, "its router reads other rows than its experts")
    return FoundSelector(None, reason)


def _selector(router: Router) -> Selector:
    weight = router.weight.weight
    assert isinstance(weight, Tensor)
    return Selector(weight, router.weight.bias, router.rule)


def _agrees(selector: Selector, rows: Tensor, made: Routing) -> bool:
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.shape[1] != selector.weight.shape[1]:
        return False
    ours = selector.select(selector.scores(rows))
    return torch.equal(ours.expert_ids, made.expert_ids) and torch.allclose(
        ours.weights, made.weights, rtol=_TOLERANCE
    )
