"""``pesf:SHARE``: prompts do without experts that few of their tokens want (prefill-time expert
skipping by frequency, EAC-MoE; lossy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from routing.policies.arguments import Arguments
from routing.policies.base import Policy, RoutingContext, keep
from routing.routing import UNUSED, Routing
from routing.statistics import Phase


@dataclass(frozen=True)
class PrefillSkipping(Policy):
    """Skip experts with fewer than ``share`` of their equal part of the visits, ``T K / E``.

    Weights that are left to a token are scaled to the sum of all. A token of which every expert is
    skipped goes without. What is skipped depends on the prompts that are read together.
    """

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
