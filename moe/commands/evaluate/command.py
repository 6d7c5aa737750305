"""``moe eval``: how well a model predicts a text, and how it differs from the original model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

from moe.commands.console import stdout_console
from moe.commands.evaluate.policy_costs import (
    WINDOW,
    PolicyCost,
    PolicyCostMeter,
    alone_and_together,
    cost_table,
)
from moe.commands.evaluate.scoring import (
    Difference,
    Score,
    price_kv_policy,
    read,
    read_text,
    windows_of,
)
from moe.errors import RequestError
from moe.hooks import ModelHook
from moe.model import MoE
from moe.settings.profile import LoadedProfile


class Evaluation(Protocol):
    """What an evaluation has found."""

    @property
    def policies(self) -> tuple[PolicyCost, ...]:
        """The costs of the profile's routing policies."""
        ...

    @property
    def window(self) -> int:
        """Tokens whose distinct experts they count."""
        ...

    def as_json(self) -> dict[str, Any]: ...

    def table(self) -> Table: ...


EVALUATE = ModelHook[Callable[[MoE, str, int | None, str | None], Evaluation]]("evaluate")
"""Evaluates a model on a text, with ``--tokens`` and ``--against``, in place of `evaluate`."""


@dataclass(frozen=True)
class Quality:
    """The quality of predictions of a text.

    Attributes:
        tokens, num_bytes: size of the text that was read.
        bits_per_byte: cross-entropy of the text over its bytes.
        perplexity: of a token.
        difference: from the original model, if there is one to compare with.
        policies: the costs of the profile's routing policies and of further readings.
        kv_policy: what `memory.kv_policy` costs, see `price_kv_policy`.
    """

    tokens: int
    num_bytes: int
    bits_per_byte: float
    perplexity: float
    difference: Difference | None = None
    policies: tuple[PolicyCost, ...] = ()
    kv_policy: float | None = None
    window: ClassVar[int] = WINDOW

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
        if self.kv_policy is not None:
            found["kv_policy_times_bits"] = self.kv_policy
        if self.policies:
            found["policies"] = [asdict(cost) for cost in self.policies]
        return found

    def table(self) -> Table:
        table = Table(show_header=False)
        rows = [
            ("tokens", f"{self.tokens:,}"),
            ("bits per byte", f"{self.bits_per_byte:.4f}"),
            ("perplexity of a token", f"{self.perplexity:.3f}"),
        ]
        if (found := self.difference) is not None:
            routing = ", ".join(f"{share:.3f}" for share in found.routing)
            rows += [
                ("KL from the original, bits a token", f"{found.kl:.5f}"),
                ("same most likely token", f"{found.agreement:.4f}"),
                ("same experts, by layer", routing),
            ]
        if self.kv_policy is not None:
            rows.append(("bits with memory.kv_policy, of those without", f"{self.kv_policy:.5f}"))
        for row in rows:
            table.add_row(*row)
        return table


def evaluate(
    model: MoE,
    text: str,
    *,
    tokens: int | None = None,
    original: MoE | None = None,
    progress: bool = False,
) -> Quality:
    """Read a text in windows of 512 tokens, as a prompt, and score it; then score each routing
    policy of the profile against the model without policies.

    Args:
        text: at least two tokens.
        tokens: how many to read at most; None for all.
        original: model to compare with, of the same vocabulary and number of experts.
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
    prices = PolicyCostMeter(model, alone_and_together(model))
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
        kv_policy=price_kv_policy(model, ids),
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
    if (own := EVALUATE.of(model.backbone.model)) is not None:
        return _show(own(model, words, tokens, against), as_json=as_json)
    original = None if against is None else MoE.from_pretrained(against, progress=shown)
    quality = evaluate(model, words, tokens=tokens, original=original, progress=shown)
    return _show(quality, as_json=as_json)


def _show(found: Evaluation, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found.as_json()))
        return 0
    stdout_console().print(found.table())
    if found.policies:
        stdout_console().print(cost_table(found.policies, found.window))
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
