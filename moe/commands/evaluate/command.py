"""``moe eval``: how well a model predicts a text, and how far it is from the model it came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from moe.commands.console import stdout_console
from moe.commands.evaluate.scoring import Difference, Reading, Score, read, read_text, windows_of
from moe.errors import RequestError
from moe.model import MoE
from moe.settings.profile import LoadedProfile
from moe.speculate.contrast import uncontrasted
from routing import PHASES, Phase, Policy, PolicyChain, Routing, RoutingContext

# ---- A model with other routing policies for a while, and where its tokens go then.


@dataclass(eq=False)
class Visited(Policy):
    """Changes nothing, and remembers where the tokens of each layer went."""

    spec: str = "visited"
    expert_ids: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        self.expert_ids[context.layer] = routing.expert_ids
        return routing

    def of_tokens(self, count: int) -> Tensor:
        """``(L, T, K)``, -1 for none, of the ``T`` tokens that were read last; in both readings of
        each where there are two."""
        rows = torch.stack([self.expert_ids[layer] for layer in sorted(self.expert_ids)])
        return torch.cat(rows.split(count, 1), -1)


@contextmanager
def routed_by(model: MoE, chain: PolicyChain, *, contrasted: bool = False) -> Iterator[Visited]:
    """The model with other policies, and without contrast or with its own, while this is open;
    gives where its tokens go then."""
    own, visited = model.experts.policies, Visited()
    model.experts.policies = PolicyChain((*chain.policies, visited))
    once = nullcontext() if contrasted else uncontrasted(model.backbone, model.experts)
    try:
        with once:
            yield visited
    finally:
        model.experts.policies = own


def distinct_experts(visited_LTK: Tensor, tokens: int) -> Tensor:
    """``(L, T // tokens)`` int64: experts that each whole run of so many tokens visits."""
    layers, count, slots = visited_LTK.shape
    whole = visited_LTK[:, : count // tokens * tokens]
    runs = whole.reshape(layers, count // tokens, tokens * slots)
    ordered = runs.sort(-1).values
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return new.sum(-1) + (ordered[..., 0] >= 0)


# ---- What routing policies and self-contrast cost and save on a text, each against the model
# alone.
#
# A policy may treat prompts and tokens that are decoded differently, so a text is read as either;
# a window of 512 tokens in one pass says the same of tokens that are decoded together as many
# small passes, since policies that share experts cut it into their own runs. What `resident`
# costs is for the cache as it is while the text is read.

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


@dataclass(frozen=True)
class Way:
    """How the model is read: by policies, and with self-contrast if its profile asks for it."""

    chain: PolicyChain
    contrasted: bool = False

    @property
    def name(self) -> str:
        parts = [policy.spec for policy in self.chain.policies]
        return " + ".join([*parts, "self-contrast"] if self.contrasted else parts)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In which it does something; contrast alone makes no difference between them."""
        policies = self.chain.policies
        wanted = tuple(p for p in PHASES if any(p in policy.phases for policy in policies))
        return wanted or ("decode",)


def alone_and_together(model: MoE) -> list[Way]:
    """Each lossy policy of a model's profile by itself, contrast by itself, and all of them."""
    chain, contrasted = model.experts.policies, model.backbone.contrast is not None
    ways = [Way(PolicyChain((policy,))) for policy in chain.policies if not policy.lossless]
    if contrasted:
        ways.append(Way(PolicyChain(), contrasted))
    return [*ways, Way(chain, contrasted)] if len(chain.policies) + contrasted > 1 else ways


class PolicyPrices:
    """Reads windows in each of several ways, and plainly."""

    def __init__(self, model: MoE, ways: Sequence[Way]) -> None:
        self._model = model
        self._plain = _Sums()
        self._sums = [(way, phase, _Sums()) for way in ways for phase in way.phases]

    def add(self, window: Sequence[int]) -> None:
        """Read one window in every way."""
        if not self._sums:
            return
        with routed_by(self._model, PolicyChain()) as visited:
            plain = read(self._model, window)
        self._plain.add(plain, plain, visited)
        for way, phase, sums in self._sums:
            with routed_by(self._model, way.chain, contrasted=way.contrasted) as visited:
                reading = read(self._model, window, phase=phase)
            sums.add(reading, plain, visited)

    def costs(self, num_bytes: int) -> tuple[PolicyCost, ...]:
        """One for each policy and phase; ``num_bytes`` of the text that was read."""
        return tuple(
            sums.cost(way.name, phase, self._plain, num_bytes) for way, phase, sums in self._sums
        )


class _Sums:
    """Of readings in one way."""

    def __init__(self) -> None:
        self._score = Score()
        self._visits, self._distinct, self._runs = 0, 0, 0

    def add(self, reading: Reading, plain: Reading, visited: Visited) -> None:
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


# ----


@dataclass(frozen=True)
class Quality:
    """How well a text is predicted.

    Attributes:
        tokens, num_bytes: of the text that was read.
        bits_per_byte: information of the text given the model, by its bytes.
        perplexity: of a token.
        difference: from the original model, where there is one.
        policies: what each of the profile's routing policies costs, and self-contrast.
    """

    tokens: int
    num_bytes: int
    bits_per_byte: float
    perplexity: float
    difference: Difference | None = None
    policies: tuple[PolicyCost, ...] = ()

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity,
        }
        if self.difference is not None:
            found |= {
                "kl_bits": self.difference.kl,
                "top1_agreement": self.difference.agreement,
                "routing_agreement": list(self.difference.routing),
            }
        if self.policies:
            found["policies"] = [asdict(cost) for cost in self.policies]
        return found


def evaluate(
    model: MoE,
    text: str,
    *,
    tokens: int | None = None,
    original: MoE | None = None,
    progress: bool = False,
) -> Quality:
    """Read a text in windows of 512 tokens and score it, with the profile's routing policies as
    for a prompt, and beside it with and without each policy.

    Args:
        text: at least two tokens.
        tokens: how many to read at most; None for all.
        original: what to compare with, of the same vocabulary and experts.
        progress: show a bar on stderr.

    Raises:
        RequestError: the text is too short, or the models cannot be compared.
    """
    windows = windows_of(model, text, tokens)
    if not windows:
        raise RequestError("the text has fewer than two tokens, so there is nothing to predict")
    if original is not None:
        _check(model, original, text)
    score = Score()
    prices = PolicyPrices(model, alone_and_together(model))
    bar = {"console": Console(stderr=True), "disable": not progress, "transient": True}
    for window in track(windows, "reading", **bar):  # type: ignore[arg-type]
        before = None if original is None else read(original, window)
        score.add(read(model, window), before)
        prices.add(window)
    ids = [*windows[0], *(token for window in windows[1:] for token in window[1:])]
    num_bytes = len(text.encode()) if tokens is None else len(model.codec.decode(ids).encode())
    return Quality(
        tokens=len(ids),
        num_bytes=num_bytes,
        bits_per_byte=score.bits / num_bytes,
        perplexity=2.0 ** (score.bits / score.predicted),
        difference=None if original is None else score.difference(),
        policies=prices.costs(num_bytes),
    )


def run(
    name: str | Path,
    profile: LoadedProfile,
    text: Path,
    *,
    tokens: int | None,
    against: str | None,
    as_json: bool,
) -> int:
    """The subcommand: returns the exit code."""
    if tokens is not None and tokens < 2:
        raise RequestError(f"--tokens must be at least 2, got {tokens}")
    words = read_text(text)
    shown = sys.stderr.isatty()
    model = MoE.from_pretrained(name, profile, progress=shown)
    original = None if against is None else MoE.from_pretrained(against, progress=shown)
    quality = evaluate(model, words, tokens=tokens, original=original, progress=shown)
    if as_json:
        print(json.dumps(quality.as_json()))
    else:
        stdout_console().print(_table(quality))
        if quality.policies:
            stdout_console().print(cost_table(quality.policies))
    return 0


def _check(model: MoE, original: MoE, text: str) -> None:
    sample = text[:10_000]
    if model.codec.encode(sample) != original.codec.encode(sample):
        raise RequestError("the models cut the text into different tokens: they cannot be compared")
    own, other = (
        [layer.num_experts for layer in each.experts.layers] for each in (model, original)
    )
    if own != other:
        raise RequestError(
            f"the models have different experts: {len(own)} layers of {own[0]} and {len(other)} "
            f"of {other[0]}"
        )


def _table(quality: Quality) -> Table:
    table = Table(show_header=False)
    rows = [
        ("tokens", f"{quality.tokens:,}"),
        ("bits per byte", f"{quality.bits_per_byte:.4f}"),
        ("perplexity of a token", f"{quality.perplexity:.3f}"),
    ]
    if (found := quality.difference) is not None:
        routing = ", ".join(f"{share:.3f}" for share in found.routing)
        rows += [
            ("KL from the original, bits a token", f"{found.kl:.5f}"),
            ("same most likely token", f"{found.agreement:.4f}"),
            ("same experts, by layer", routing),
        ]
    for row in rows:
        table.add_row(*row)
    return table
