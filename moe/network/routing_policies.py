"""Routing policies at an MoE layer: what they need to know is gathered, and each applied to the
tokens it is for.

Tokens are taken phase by phase: those of prompts together, and those that are decoded together.
Under expert parallelism a rank's policies see that rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from moe.network.lanes import ExpertCall
from offload.layer import LayerExperts, OffloadedExperts
from routing import PHASES, Phase, PolicyChain, Routing, RoutingContext
from routing.routers import RouterRule

# ---- A layer's router as a value that can choose again: what policies and drafts restrict.
#
# `moe.describe.routers` finds it. Legend: T rows, H hidden, E experts.


@dataclass(frozen=True)
class Selector:
    """The router of one MoE layer, for the rows that reach its experts."""

    weight: Tensor  # (E, H); the model's own
    bias: Tensor | None  # (E,)
    rule: RouterRule

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """``(T, E)`` float32 of rows ``(T, H)``: what weights are made of (`RouterRule`)."""
        return self.rule.scores(linear(hidden.float(), self.weight.float(), self.bias))

    @torch.inference_mode()
    def select(
        self, scores: Tensor, allowed: Tensor | None = None, top_k: int | None = None
    ) -> Routing:
        """The router's decision, or what it would be among ``allowed`` experts, ``top_k`` of them:
        see `RouterRule.select`. Weights are not scaled up for what is left out, unless the router
        itself renormalises."""
        return self.rule.select(scores, allowed, top_k)


@dataclass(frozen=True)
class FoundSelector:
    """What is known of one MoE layer's router; ``reason`` says why there is no selector."""

    selector: Selector | None
    reason: str = ""


# ----


def decide(
    chain: PolicyChain,
    layer: int,
    calls: Sequence[ExpertCall],
    experts: LayerExperts,
    selector: Selector | None = None,
) -> Routing:
    """Where the tokens of all visits go, in the order of the visits.

    Args:
        chain: of policies; the empty one leaves the routers' decisions as they are.
        layer: index of the MoE layer.
        experts: of that layer.
        selector: of that layer, where a policy needs one.
    """
    decided = [call.routing for call in calls]
    for phase in PHASES if chain.policies else ():
        places = [place for place, call in enumerate(calls) if call.phase == phase]
        if places:
            own = [calls[place] for place in places]
            context = _context(chain, layer, phase, own, experts, selector)
            routing = chain(Routing.concat([call.routing for call in own]), context)
            parts = routing.split([call.hidden_states.shape[0] for call in own])
            for place, part in zip(places, parts, strict=True):
                decided[place] = part
    return Routing.concat(decided)


def _context(
    chain: PolicyChain,
    layer: int,
    phase: Phase,
    calls: Sequence[ExpertCall],
    experts: LayerExperts,
    selector: Selector | None,
) -> RoutingContext:
    scores_TE = select = resident_E = importance_T = None
    if "select" in chain.needs:
        assert selector is not None, "refused while loading"
        given_TE = selector.scores(torch.cat([call.hidden_states for call in calls]))
        scores_TE, select = selector.rule.ranking(given_TE), partial(selector.select, given_TE)
    if "resident" in chain.needs and isinstance(experts, OffloadedExperts):
        resident_E = experts.cache.resident(experts.layer).to(calls[0].hidden_states.device)
    if "importance" in chain.needs:
        importance_T = torch.cat([_importance(call) for call in calls])
    return RoutingContext(
        layer, experts.num_experts, phase, scores_TE, select, resident_E, importance_T
    )


def _importance(call: ExpertCall) -> Tensor:
    size_T = call.hidden_states.float().abs().sum(1)
    return size_T if call.received is None else size_T * call.received
