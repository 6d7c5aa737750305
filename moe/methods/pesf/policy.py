"""`PrefillSkipping`: the routing policy of PESF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from routing.policies.base import Arguments, RoutingContext, RoutingPolicy, keep
from routing.routing import UNUSED, Routing
from routing.statistics import Phase


@dataclass(frozen=True)
class PrefillSkipping(RoutingPolicy):
    """Skip experts with fewer than ``share`` of their equal part of the visits of a prompt."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)

    share: float

    @property
    def spec(self) -> str:
        return f"pesf:{self.share:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> PrefillSkipping:
        wanted = Arguments(arguments, "pesf:SHARE", "a share in (0, 1]")
        return cls(wanted.share(*wanted.parts(1)))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        visits_E = routing.tokens_per_expert(context.num_experts)
        equal = (routing.expert_ids != UNUSED).sum() / context.num_experts
        wanted_E = visits_E >= self.share * equal
        return keep(routing, wanted_E[routing.expert_ids.clamp_min(0)])
