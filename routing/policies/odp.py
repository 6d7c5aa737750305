"""``odp:RATIO[:PROTECTED]``: unimportant tokens do without their weak experts (online dynamic
pruning; lossy).

RATIO is one number, or one for each MoE layer with commas between; the paper takes each layer's
median of second over first weight, which `moe trace` prints in this form. The paper is about
models with two experts a token; with more, every expert is measured against the heaviest. On
fine-grained models that is known to cost much: measure before use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from routing.policies.arguments import Arguments, PerLayer
from routing.policies.base import Need, Policy, RoutingContext, keep
from routing.routing import Routing, select_top_k

PROTECTED = 0.02
"""Share of tokens that keep all experts; the paper's."""


@dataclass(frozen=True)
class OnlineDynamicPruning(Policy):
    """Drop slots that weigh less than ``ratio`` of the token's heaviest, and scale the others to
    the sum of all; not for the ``protected`` share of the tokens of a step that matter most.

    Only tokens of prompts are protected: later tokens say which matter. (So does the published
    code; and of fewer than 50 tokens, 2 % are none.)
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
