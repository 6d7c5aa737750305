"""The interface of routing policies: `RoutingPolicy`, `RoutingContext`, and `PolicyChain`.

`keep`, `rescaled` and `by_expert` are what policies share; `Arguments` and `PerLayer` parse their
specifications.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

from torch import Tensor

from routing.routing import UNUSED, Routing, RoutingError
from routing.statistics import PHASES, Phase

Need = Literal["select", "resident"]
"""An attribute of `RoutingContext` that a policy reads."""


@dataclass(frozen=True, eq=False)
class RoutingContext:
    """The facts that a policy may know besides the routing itself. T rows of the routing, E
    experts.

    Attributes:
        layer: index of the MoE layer, counted over MoE layers only.
        num_experts: E of that layer.
        phase: the tokens' phase; None where no policy depends on it.
        scores_TE: float32 scores by which the layer's router ranks experts.
        select: the router's own choice among fewer experts, ``(allowed, top_k) -> Routing``;
            ``allowed`` is bool ``(E,)`` or ``(T, E)``, and fewer than ``top_k`` leave unused slots.
        resident_E: bool, experts that are in memory; None where all are.

    The last three are set only if a policy of the chain needs them.
    """

    layer: int
    num_experts: int
    phase: Phase | None = None
    scores_TE: Tensor | None = None
    select: Callable[[Tensor, int], Routing] | None = None
    resident_E: Tensor | None = None


class RoutingPolicy(ABC):
    """One rule that rewrites a routing.

    Attributes:
        lossless: the layer computes what it would compute without the rule.
        needs: the attributes of the context that it reads.
        phases: the phases whose tokens it changes.
    """

    lossless: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = PHASES

    @property
    @abstractmethod
    def spec(self) -> str:
        """The specification, as in a profile."""

    def check(self, num_layers: int) -> None:  # noqa: B027 - most suit any model
        """Raise `RoutingError` if the policy does not suit a model of this many MoE layers."""

    @abstractmethod
    def __call__(self, routing: Routing, context: RoutingContext) -> Routing: ...


@dataclass(frozen=True)
class PolicyChain:
    """Policies applied left to right; the empty chain is the identity."""

    policies: Sequence[RoutingPolicy] = ()

    @property
    def lossless(self) -> bool:
        return all(policy.lossless for policy in self.policies)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need]().union(*(policy.needs for policy in self.policies))

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        for policy in self.policies:
            if policy.phases == PHASES or context.phase in policy.phases:
                routing = policy(routing, context)
        return routing


def keep(routing: Routing, kept_TK: Tensor) -> Routing:
    """The routing without the slots outside ``kept_TK``, its weights scaled to the old sums."""
    kept_TK = kept_TK & (routing.expert_ids != UNUSED)
    weights = rescaled(routing.weights.masked_fill(~kept_TK, 0.0), routing.weights)
    return Routing(routing.expert_ids.masked_fill(~kept_TK, UNUSED), weights).ascending()


def rescaled(weights: Tensor, before: Tensor) -> Tensor:
    """``(T, K)`` weights of tokens, scaled to the sum that each token's were before."""
    total = weights.sum(1, keepdim=True)
    return weights * (before.sum(1, keepdim=True) / total.where(total != 0, 1.0))


def by_expert(routing: Routing, values_TK: Tensor, num_experts: int) -> Tensor:
    """``(T, E)``: the value of each token's slot for an expert, 0 where it does not visit it."""
    table = values_TK.new_zeros(routing.num_tokens, num_experts + 1)
    return table.scatter(1, routing.expert_ids + 1, values_TK)[:, 1:]


@dataclass(frozen=True)
class PerLayer:
    """One number for all MoE layers, or one for each."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return ",".join(f"{value:g}" for value in self.values)

    def check(self, spec: str, num_layers: int) -> None:
        """Raise `RoutingError` unless there is one number, or one for each layer."""
        if len(self.values) not in (1, num_layers):
            raise RoutingError(
                f"policy '{spec}' has numbers for {len(self.values)} MoE layers, and the model has "
                f"{num_layers}; give one number, or one for each"
            )

    def of(self, layer: int) -> float:
        return self.values[layer if len(self.values) > 1 else 0]


@dataclass(frozen=True)
class Arguments:
    """The arguments in a policy's specification; each method raises `RoutingError` for a bad one.

    Attributes:
        given: the texts between colons.
        form: how to write the specification, for the message; begins with the name.
        rule: what the arguments must be, for the message.
    """

    given: list[str]
    form: str
    rule: str

    def fail(self) -> NoReturn:
        spec = ":".join([self.form.partition(":")[0], *self.given])
        raise RoutingError(f"policy '{spec}' is not valid; write {self.form} with {self.rule}")

    def parts(self, count: int, *defaults: str) -> list[str]:
        """All ``count`` arguments; ``defaults`` stand in for the last ones."""
        missing = count - len(self.given)
        if not 0 <= missing <= len(defaults):
            self.fail()
        return [*self.given, *defaults[len(defaults) - missing :]]

    def whole(self, text: str) -> int:
        """A whole number >= 1."""
        if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < 1:
            self.fail()
        return int(text)

    def share(self, text: str, *, zero: bool = False) -> float:
        """A number in ``(0, 1]``; with ``zero`` in ``[0, 1]``."""
        try:
            number = float(text)
        except ValueError:
            self.fail()
        if not (0 < number <= 1 or (zero and number == 0)):
            self.fail()
        return number

    def per_layer(self, text: str, *, zero: bool = False) -> PerLayer:
        """Shares separated by commas."""
        return PerLayer(tuple(self.share(value, zero=zero) for value in text.split(",")))
