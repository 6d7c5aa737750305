"""Routing policies at an MoE layer: what they need to know is gathered, and each applied to the
tokens it is for.

Tokens are taken phase by phase: those of prompts together, and those that are decoded together.
Under expert parallelism a rank's policies see that rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moe.selector import Selector
from moe.visit import Visit
from offload.experts import LayerExperts, OffloadedExperts
from routing import PHASES, Phase, PolicyChain, Routing, RoutingContext


def decide(
    chain: PolicyChain,
    layer: int,
    visits: Sequence[Visit],
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
    decided = [visit.routing for visit in visits]
    for phase in PHASES if chain.policies else ():
        places = [place for place, visit in enumerate(visits) if visit.phase == phase]
        if places:
            own = [visits[place] for place in places]
            context = _context(chain, layer, phase, own, experts, selector)
            routing = chain(Routing.concat([visit.routing for visit in own]), context)
            parts = routing.split([visit.hidden_states.shape[0] for visit in own])
            for place, part in zip(places, parts, strict=True):
                decided[place] = part
    return Routing.concat(decided)


def _context(
    chain: PolicyChain,
    layer: int,
    phase: Phase,
    visits: Sequence[Visit],
    experts: LayerExperts,
    selector: Selector | None,
) -> RoutingContext:
    scores_TE = select = resident_E = importance_T = None
    if "select" in chain.needs:
        assert selector is not None, "refused while loading"
        given_TE = selector.scores(torch.cat([visit.hidden_states for visit in visits]))
        scores_TE, select = selector.rule.ranking(given_TE), partial(selector.select, given_TE)
    if "resident" in chain.needs and isinstance(experts, OffloadedExperts):
        resident_E = experts.cache.resident(experts.layer).to(visits[0].hidden_states.device)
    if "importance" in chain.needs:
        importance_T = torch.cat([_importance(visit) for visit in visits])
    return RoutingContext(
        layer, experts.num_experts, phase, scores_TE, select, resident_E, importance_T
    )


def _importance(visit: Visit) -> Tensor:
    size_T = visit.hidden_states.float().abs().sum(1)
    return size_T if visit.received is None else size_T * visit.received
