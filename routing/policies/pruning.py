"""Policies by which tokens visit fewer experts; all are lossy.

``top_k:N[:keep]`` keeps the N heaviest experts of each token: the baseline for the others.

``top_p:P`` keeps the heaviest experts whose weights together reach the share P. A token sure
of one expert visits few, an undecided one all: at equal numbers of visits it loses less weight.

``odp:RATIO[:PROTECTED]`` (online dynamic pruning) drops weak experts of unimportant tokens. RATIO
is one number, or one for each MoE layer, separated by commas; the paper takes each layer's median
of second over first weight, which `moe trace` prints in this form. The paper is about two experts a
token; with more, every expert is compared with the heaviest, which is known to cost much quality on
fine-grained models: measure before use.

``pesf:SHARE`` (prefill-time expert skipping by frequency, EAC-MoE) skips experts that few tokens of
the prompts want.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from routing.policies.base import (
    Arguments,
    Need,
    PerLayer,
    RoutingContext,
    RoutingPolicy,
    keep,
    rescaled,
)
from routing.routing import UNUSED, Routing, RoutingError, select_top_k
from routing.statistics import Phase

PROTECTED = 0.02
"""Share of tokens that keep all experts; the paper's."""


@dataclass(frozen=True)
class TopK(RoutingPolicy):
    """Keep the ``top_k`` heaviest slots of each token.

    With ``renormalise`` the kept weights are scaled to the old sum of all slots; without it the
    dropped weight is missing, as if the experts' outputs were zero.
    """

    top_k: int
    renormalise: bool = True

    @property
    def spec(self) -> str:
        return f"top_k:{self.top_k}" + ("" if self.renormalise else ":keep")

    @classmethod
    def parse(cls, arguments: list[str]) -> TopK:
        """``["2"]`` or ``["2", "keep"]``; anything else is a `RoutingError`."""
        number, *rest = arguments or [""]
        if not number.isdigit() or int(number) < 1 or rest not in ([], ["keep"]):
            raise RoutingError(
                f"policy 'top_k:{':'.join(arguments)}' is not valid; write top_k:N or top_k:N:keep "
                "with a whole number N >= 1"
            )
        return cls(int(number), renormalise=not rest)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        if self.top_k >= routing.top_k:
            return routing
        used = routing.expert_ids != UNUSED
        kept = select_top_k(routing.weights.masked_fill(~used, -float("inf")), self.top_k)
        weights = routing.weights.gather(1, kept)
        if self.renormalise:
            weights = rescaled(weights, routing.weights)
        return Routing(routing.expert_ids.gather(1, kept), weights).ascending()


@dataclass(frozen=True)
class TopP(RoutingPolicy):
    """Keep each token's heaviest slots, up to the one with which their sum reaches ``share`` of all
    its weight; the kept weights are scaled to the sum of all."""

    share: float

    @property
    def spec(self) -> str:
        return f"top_p:{self.share:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> TopP:
        wanted = Arguments(arguments, "top_p:P", "a share P in (0, 1]")
        return cls(wanted.share(*wanted.parts(1)))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        if self.share == 1:
            return routing
        heaviest = routing.weights.sort(dim=1, descending=True, stable=True)
        before = heaviest.values.cumsum(1) - heaviest.values
        needed = before < self.share * routing.weights.sum(1, keepdim=True)
        return keep(routing, needed.new_zeros(needed.shape).scatter(1, heaviest.indices, needed))


@dataclass(frozen=True)
class OnlineDynamicPruning(RoutingPolicy):
    """Drop slots that weigh less than ``ratio`` of the token's heaviest, and scale the others to
    the old sum; the most important tokens of a step, the share ``protected``, keep all slots.

    Only prompt tokens are protected, as in the published code: importance is the attention from
    later tokens. With 2 %, a prompt of fewer than 50 tokens has no protected token.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"importance"})

    ratios: PerLayer
    protected: float = PROTECTED

    @property
    def spec(self) -> str:
        return f"odp:{self.ratios}:{self.protected:g}"

    @classmethod
    def parse(cls, arguments: list[str]) -> OnlineDynamicPruning:
        rule = "shares in [0, 1], RATIO one or one for each MoE layer with commas between"
        wanted = Arguments(arguments, "odp:RATIO[:PROTECTED]", rule)
        ratios, protected = wanted.parts(2, str(PROTECTED))
        return cls(wanted.per_layer(ratios, zero=True), wanted.share(protected, zero=True))

    def check(self, num_layers: int) -> None:
        self.ratios.check(self.spec, num_layers)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        ratio = self.ratios.of(context.layer)
        kept = routing.weights >= ratio * routing.weights.amax(1, keepdim=True)
        count = int(self.protected * routing.num_tokens)
        if count and context.phase == "prefill":
            assert context.importance_T is not None
            kept[select_top_k(context.importance_T[None], count)[0]] = True
        return keep(routing, kept)


@dataclass(frozen=True)
class PrefillSkipping(RoutingPolicy):
    """Skip experts with fewer than ``share`` of their equal part of the visits, ``T K / E``.

    A token's remaining weights are scaled to the old sum; a token whose experts are all skipped
    gets no expert output. What is skipped depends on the prompts that are read together.
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
