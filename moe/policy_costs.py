"""What routing policies cost and save on a text, each against the model without policies.

A policy may treat prompts and tokens that are decoded differently, so a text is read as either; a
window of 512 tokens in one pass says the same of tokens that are decoded together as many small
passes, since policies that share experts cut it into their own runs. What `resident` costs is for
the cache as it is while the text is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.table import Table
from torch import Tensor

from moe.model import MoE
from moe.scoring import Reading, Score, read
from routing import PHASES, Phase, Policy, PolicyChain, Routing, RoutingContext

WINDOW = 8
"""Tokens whose distinct experts are counted: a verified draft, or a small batch."""


@dataclass(frozen=True)
class PolicyCost:
    """What a policy does to a text.

    Attributes:
        policy: its specification; several, joined by `` + ``, for the chain of all.
        phase: what the text was read as.
        bits_per_byte, without: of the text with the policy, and with none.
        kl_bits: divergence from the predictions without policies, bits a token.
        top1_agreement: share of tokens with the same most likely next token.
        distinct, distinct_without: experts that a layer reads for 8 consecutive tokens, mean.
        dropped: share of the visits that are not made.
    """

    policy: str
    phase: Phase
    bits_per_byte: float
    without: float
    kl_bits: float
    top1_agreement: float
    distinct: float
    distinct_without: float
    dropped: float

    @property
    def worse(self) -> float:
        """By what share the text takes more bits."""
        return self.bits_per_byte / self.without - 1


def alone_and_together(chain: PolicyChain) -> list[PolicyChain]:
    """Each lossy policy of a chain by itself, and the chain."""
    chains = [PolicyChain((policy,)) for policy in chain.policies if not policy.lossless]
    return [*chains, chain] if len(chain.policies) > 1 else chains


class PolicyPrices:
    """Reads windows with each of several chains, and with none."""

    def __init__(self, model: MoE, chains: Sequence[PolicyChain]) -> None:
        self._model = model
        self._plain = _Sums()
        self._sums: dict[tuple[str, Phase], tuple[PolicyChain, _Sums]] = {
            (" + ".join(policy.spec for policy in own.policies), phase): (own, _Sums())
            for own in chains
            for phase in PHASES
            if any(phase in policy.phases for policy in own.policies)
        }

    def add(self, window: Sequence[int]) -> None:
        """Read one window in every way."""
        if not self._sums:
            return
        with routed_by(self._model, PolicyChain()) as visited:
            plain = read(self._model, window)
        self._plain.add(plain, plain, visited)
        for (_, phase), (chain, sums) in self._sums.items():
            with routed_by(self._model, chain) as visited:
                reading = read(self._model, window, phase=phase)
            sums.add(reading, plain, visited)

    def costs(self, num_bytes: int) -> tuple[PolicyCost, ...]:
        """One for each policy and phase; ``num_bytes`` of the text that was read."""
        return tuple(
            sums.cost(name, phase, self._plain, num_bytes)
            for (name, phase), (_, sums) in self._sums.items()
        )


@dataclass(eq=False)
class Visited(Policy):
    """Changes nothing, and remembers where the tokens of each layer went."""

    spec: str = "visited"
    expert_ids: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        self.expert_ids[context.layer] = routing.expert_ids
        return routing

    @property
    def experts_LTK(self) -> Tensor:
        """Ascending; -1 for none. Of the tokens that were read last."""
        return torch.stack([self.expert_ids[layer] for layer in sorted(self.expert_ids)])


@contextmanager
def routed_by(model: MoE, chain: PolicyChain) -> Iterator[Visited]:
    """The model with other policies while this is open; gives where its tokens go then."""
    own, visited = model._experts.policies, Visited()
    model._experts.policies = PolicyChain((*chain.policies, visited))
    try:
        yield visited
    finally:
        model._experts.policies = own


class _Sums:
    """Of readings in one way."""

    def __init__(self) -> None:
        self._score = Score()
        self._visits, self._distinct, self._runs = 0, 0, 0

    def add(self, reading: Reading, plain: Reading, visited: Visited) -> None:
        self._score.add(reading, plain)
        experts_LTK = visited.experts_LTK
        self._visits += int((experts_LTK >= 0).sum())
        counts = distinct_experts(experts_LTK, WINDOW)
        self._distinct, self._runs = self._distinct + int(counts.sum()), self._runs + counts.numel()

    def cost(self, name: str, phase: Phase, plain: _Sums, num_bytes: int) -> PolicyCost:
        found = self._score.difference()
        return PolicyCost(
            policy=name,
            phase=phase,
            bits_per_byte=self._score.bits / num_bytes,
            without=plain._score.bits / num_bytes,
            kl_bits=found.kl,
            top1_agreement=found.agreement,
            distinct=self._distinct / max(self._runs, 1),
            distinct_without=plain._distinct / max(plain._runs, 1),
            dropped=1 - self._visits / max(plain._visits, 1),
        )


def distinct_experts(visited_LTK: Tensor, tokens: int) -> Tensor:
    """``(L, T // tokens)`` int64: experts that each whole run of so many tokens visits."""
    layers, count, slots = visited_LTK.shape
    whole = visited_LTK[:, : count // tokens * tokens]
    runs = whole.reshape(layers, count // tokens, tokens * slots)
    ordered = runs.sort(-1).values
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return new.sum(-1) + (ordered[..., 0] >= 0)


def cost_table(costs: Sequence[PolicyCost]) -> Table:
    """For people."""
    without, distinct = costs[0].without, costs[0].distinct_without
    table = Table(
        title=f"Policies; without any {without:.4f} bits per byte, and {distinct:.1f} experts of a "
        f"layer for {WINDOW} tokens",
        title_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=16)
    table.add_column("as")
    for column in ("worse %", "KL bits", "agree", f"for {WINDOW}", "dropped %"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(
            cost.policy if " + " not in cost.policy else "all of them",
            {"prefill": "prompt", "decode": "decoded"}[cost.phase],
            f"{100 * cost.worse:.2f}",
            f"{cost.kl_bits:.5f}",
            f"{cost.top1_agreement:.4f}",
            f"{cost.distinct:.1f}",
            f"{100 * cost.dropped:.1f}",
        )
    return table
