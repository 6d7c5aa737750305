"""`PreferResident`: the routing policy. Legend: T tokens, K slots, E experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from routing.policies.base import Arguments, Need, RoutingContext, RoutingPolicy, by_expert
from routing.routing import UNUSED, Routing
from routing.statistics import Phase

_OUT = -float("inf")


@dataclass(frozen=True)
class PreferResident(RoutingPolicy):
    """Replace missing experts, a token's lowest score first, each by the best resident expert left,
    if that one's score is below the missing one's by at most the share ``margin`` of it."""

    needs: ClassVar[frozenset[Need]] = frozenset({"select", "resident"})
    phases: ClassVar[tuple[Phase, ...]] = ("decode",)

    margin: float

    @property
    def spec(self) -> str:
        return f"resident:{self.margin:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> PreferResident:
        wanted = Arguments(arguments, "resident:MARGIN", "a share in [0, 1] of a score")
        return cls(wanted.share(*wanted.parts(1), zero=True))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        if context.resident_E is None or routing.num_tokens == 0:
            return routing
        scores_TE, select = context.scores_TE, context.select
        assert scores_TE is not None
        assert select is not None
        used_TK = routing.expert_ids != UNUSED
        chosen_TE = by_expert(routing, used_TK, context.num_experts)
        count = min(routing.top_k, context.num_experts)
        missing_TE, spare_TE = chosen_TE & ~context.resident_E, context.resident_E & ~chosen_TE
        missing = scores_TE.where(missing_TE, -_OUT).sort(dim=1, stable=True)
        spare = scores_TE.where(spare_TE, _OUT).sort(dim=1, descending=True, stable=True)
        lost, gained = missing.values[:, :count], spare.values[:, :count]
        near = (gained >= lost - self.margin * lost.abs()) & lost.isfinite()
        if not bool(near.any()):
            return routing
        none_TE = torch.zeros_like(chosen_TE)
        gone_TE = none_TE.scatter(1, missing.indices[:, :count], near)
        new_TE = none_TE.scatter(1, spare.indices[:, :count], near)
        return select(chosen_TE & ~gone_TE | new_TE, routing.top_k)
