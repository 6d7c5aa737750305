"""Finds the rule of routers that read other rows than their experts.

Such routers are modules that return scores, weights and ids. Their scores come with each call of
experts from then on (`moe.network.moe_layer.WatchedSelector`), so that policies can choose again.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moe.describe.observe import ObservedCall
from moe.methods.diffusion.driver import CanvasDriver
from moe.network.moe_layer import FoundSelector, WatchedSelector
from moe.network.seam import experts_modules, parents_of, watch_router
from routing import Routing
from routing.routers import RouterRule

_SAME_WEIGHTS = 1e-4


def watch_selectors(driver: CanvasDriver) -> list[FoundSelector]:
    """One entry for each MoE layer of the driver's model."""
    seen: dict[nn.Module, ObservedCall] = {}
    parents = parents_of(driver.model)
    found = [experts for _, experts in experts_modules(driver.model)]
    routers = {
        module: experts
        for experts in found
        for module in parents[experts].modules()
        if module not in (experts, parents[experts])
    }

    def keep(module: nn.Module, inputs: Any, kwargs: Any, outputs: Any) -> None:
        seen[module] = ObservedCall.of(inputs, kwargs, outputs)

    hooks = [router.register_forward_hook(keep, with_kwargs=True) for router in routers]
    try:
        with torch.inference_mode():
            driver.prove()
    finally:
        for hook in hooks:
            hook.remove()
    made = dict.fromkeys(found, FoundSelector(None, "no module beside its experts returns scores"))
    for router, experts in routers.items():
        if router in seen and (fitted := _fit_scores(router, seen[router], experts)) is not None:
            output, selector = fitted
            made[experts] = FoundSelector(selector)
            watch_router(experts, router, output)
    return list(made.values())


def _fit_scores(
    router: nn.Module, call: ObservedCall, experts: Any
) -> tuple[int, WatchedSelector] | None:
    """Which output of a module holds scores, and the rule that makes its choice of them."""
    count = experts.expert_seat.num_experts
    tensors = [one for one in call.outputs if isinstance(one, Tensor) and one.ndim == 2]
    ids = next((one for one in tensors if not one.is_floating_point()), None)
    if ids is None or len(tensors) != len(call.outputs):
        return None
    own = [p.detach().float() for p in router.parameters() if p.numel() == count and p.ndim == 1]
    floats = [at for at, one in enumerate(call.outputs) if one.is_floating_point()]
    for at, weights_at in product(floats, floats):
        scores, weights = call.outputs[at].float(), call.outputs[weights_at]
        if at == weights_at or scores.shape[1] != count or weights.shape != ids.shape:
            continue
        expected = Routing.from_router(ids, weights, count)
        for renormalise, scale in product((False, True), (*own, None)):
            rule = RouterRule(ids.shape[1], renormalise=renormalise, expert_scale=scale)
            ours = rule.select(scores)
            if torch.equal(ours.expert_ids, expected.expert_ids) and torch.allclose(
                ours.weights, expected.weights.float(), rtol=_SAME_WEIGHTS
            ):
                return at, WatchedSelector(scores, None, rule)
    return None
