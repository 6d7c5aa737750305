"""Prices routing policies and further readings on a text, beside the plain model.

A policy may treat prompts and decoded tokens differently, so the text is read once as each. One
pass over a window of 512 tokens gives the same result as many small decode steps, because policies
that share experts cut the window into their own runs. The cost of `resident` depends on what is in
the cache while the text is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from rich.table import Table
from torch import Tensor

from moe.commands.evaluate.scoring import Score, WindowReading, read, read_once
from moe.model import MoE
from routing import Phase, PolicyChain, Routing, RoutingContext, RoutingPolicy

WINDOW = 8
"""Tokens whose distinct experts are counted: a verified draft, or a small batch."""


@dataclass(frozen=True)
class PolicyCost:
    """The effect of a policy on a text.

    Attributes:
        policy: its specification; several, joined by `` + ``, for the chain of all.
        phase: as which the text was read.
        bits_per_byte, without: cross-entropy of the text with the policy, and without any.
        kl_bits: KL divergence from the predictions without policies, in bits per token.
        top1_agreement: share of tokens with the same most likely next token.
        distinct, distinct_without: mean distinct experts of a layer for 8 consecutive tokens (or
            `Evaluation.window`), with the policy and without any.
        dropped: share of (token, expert) pairs that the policy removes.
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
        """Relative increase of the bits per byte."""
        return self.bits_per_byte / self.without - 1


@dataclass(frozen=True)
class Variant:
    """A way to run the model.

    Attributes:
        chain: of policies.
        reader: name of the `PassReader` that reads it; empty: none.
    """

    chain: PolicyChain
    reader: str = ""

    @property
    def name(self) -> str:
        parts = [policy.spec for policy in self.chain.policies]
        return " + ".join(filter(None, [*parts, self.reader]))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in which its policies act; a reader alone is the same in both."""
        policies = self.chain.policies
        read_singly: tuple[Phase, ...] = ("prefill", "decode")
        wanted = tuple(p for p in read_singly if any(p in policy.phases for policy in policies))
        return wanted or ("decode",)


def alone_and_together(model: MoE) -> list[Variant]:
    """Each lossy policy of a model's profile by itself, its reader by itself, and all together."""
    chain, reader = model.experts.policies, model.backbone.reader
    name = "" if reader is None else reader.name
    variants = [Variant(PolicyChain((policy,))) for policy in chain.policies if not policy.lossless]
    if name:
        variants.append(Variant(PolicyChain(), name))
    if len(chain.policies) + bool(name) > 1:
        variants.append(Variant(chain, name))
    return variants


class PolicyCostMeter:
    """Reads windows in each of several variants, and without policies."""

    def __init__(self, model: MoE, variants: Sequence[Variant]) -> None:
        self._model = model
        self._plain = _Sums()
        self._sums = [(each, phase, _Sums()) for each in variants for phase in each.phases]

    def add(self, window: Sequence[int]) -> None:
        """Read a window in every variant."""
        if not self._sums:
            return
        with routed_by(self._model, PolicyChain()) as visited:
            plain = read(self._model, window)
        self._plain.add(plain, plain, visited)
        for variant, phase, sums in self._sums:
            with routed_by(self._model, variant.chain, by_reader=bool(variant.reader)) as visited:
                reading = read(self._model, window, phase=phase)
            sums.add(reading, plain, visited)

    def costs(self, num_bytes: int) -> tuple[PolicyCost, ...]:
        """The cost of each variant in each of its phases, of a text of ``num_bytes``."""
        return tuple(
            sums.cost(variant.name, phase, self._plain, num_bytes)
            for variant, phase, sums in self._sums
        )


class _Sums:
    """Sums over the readings of one variant."""

    def __init__(self) -> None:
        self._score = Score()
        self._visits, self._distinct, self._runs = 0, 0, 0

    def add(self, reading: WindowReading, plain: WindowReading, visited: VisitRecorder) -> None:
        self._score.add(reading, plain)
        experts_LTK = visited.of_tokens(len(reading.token_ids))
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


def cost_table(costs: Sequence[PolicyCost], window: int = WINDOW) -> Table:
    """A table of the costs; ``window``: tokens whose distinct experts were counted."""
    without, distinct = costs[0].without, costs[0].distinct_without
    table = Table(
        title=f"Policies; without any {without:.4f} bits per byte, and {distinct:.1f} experts of a "
        f"layer for {window} tokens",
        title_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=16)
    table.add_column("as")
    for column in ("worse %", "KL bits", "agree", f"for {window}", "dropped %"):
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


@dataclass(eq=False)
class VisitRecorder(RoutingPolicy):
    """A routing policy that changes nothing and records the experts of each layer's tokens."""

    spec: str = "visited"
    expert_ids: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        self.expert_ids[context.layer] = routing.expert_ids
        return routing

    def of_tokens(self, count: int) -> Tensor:
        """``(L, T, K)`` experts of the ``T`` tokens that were read last, -1 for none. If a
        pass reads each token several times, K covers all readings."""
        rows = torch.stack([self.expert_ids[layer] for layer in sorted(self.expert_ids)])
        return torch.cat(rows.split(count, 1), -1)


@contextmanager
def routed_by(
    model: MoE, chain: PolicyChain, *, by_reader: bool = False
) -> Iterator[VisitRecorder]:
    """Run the model with other policies, and without its `PassReader` unless ``by_reader``; gives
    the experts that its tokens visit."""
    own, visited = model.experts.policies, VisitRecorder()
    model.experts.set_policies(PolicyChain((*chain.policies, visited)))
    once = nullcontext() if by_reader else read_once(model.backbone, model.experts)
    try:
        with once:
            yield visited
    finally:
        model.experts.set_policies(own)


def distinct_experts(visited_LTK: Tensor, tokens: int) -> Tensor:
    """``(L, T // tokens)`` int64: distinct experts of each run of ``tokens`` tokens."""
    layers, count, slots = visited_LTK.shape
    whole = visited_LTK[:, : count // tokens * tokens]
    runs = whole.reshape(layers, count // tokens, tokens * slots)
    ordered = runs.sort(-1).values
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return new.sum(-1) + (ordered[..., 0] >= 0)
