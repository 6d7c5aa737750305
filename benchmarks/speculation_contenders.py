"""Ways to decode that take turns on the same prompts, and what came of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.speculation_runs import Prompts, Run, decode
from moe import MoE
from moe.speculate import Speculator

ROUNDS = 2
"""At least."""
WARM = 8
"""Tokens before anything counts."""


@dataclass
class Contender:
    """A way to decode, and its runs.

    Attributes:
        depth: None where a controller decides.
        early: its runs while it had everything to learn.
    """

    name: str
    drafts: Speculator | None
    depth: int | None
    runs: list[Run] = field(default_factory=list)
    early: list[Run] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second, of all runs but early ones."""
        return rate_of(self.runs)

    def errors(self, name: str) -> list[float]:
        """Of the controller's predictions, one for each run that it could judge."""
        found = (run.figures["control"][name] for run in self.runs)
        return [error for error in found if error is not None]

    def a_token(self, name: str) -> float:
        """Bytes of a kind for each token."""
        return sum(getattr(run, name) for run in self.runs) / sum(r.counted for r in self.runs)

    def drafted(self) -> tuple[float, float]:
        """Acceptance, and tokens a verification, over all runs."""
        verified = accepted = sequences = tokens = 0
        for run in self.runs:
            for mode in run.figures.get("modes", {}).values():
                verified, accepted = verified + mode["verified"], accepted + mode["accepted"]
            sequences += sum(run.figures.get("depths", {"0": run.counted}).values())
            tokens += run.figures.get("tokens", run.counted)
        return accepted / max(verified, 1), tokens / max(sequences, 1)


def take_turns(
    model: MoE,
    contenders: Sequence[Contender],
    prompts: Prompts,
    batch: int,
    new_tokens: int,
    temperature: float,
    seconds: float,
    *,
    early: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Each contender decodes the same prompts, in turns, until the first has had so many seconds;
    whether all said the same.

    A round has a seed, so that texts, and with them what there is to draft and what experts they
    read, are the same at any temperature. Who comes behind whom is drawn: a run that finds memory
    and caches as another one like it has left them is a little faster.

    Args:
        early: these are the first runs; they count by themselves.
    """
    order, same, first = list(contenders), True, contenders[0]
    rng = random.Random(0)
    if early:  # the first pass of a process is not like others
        decode(model, first.drafts, prompts.take(batch), WARM, temperature)
    while sum(run.seconds for run in first.runs) < seconds or len(first.runs) < ROUNDS:
        given, seed = prompts.take(batch), len(first.runs)
        texts = []
        rng.shuffle(order)
        for each in order:
            run = decode(model, each.drafts, given, new_tokens, temperature, clock, seed)
            each.runs.append(run)
            texts.append(run.tokens)
        same &= all(tokens == texts[0] for tokens in texts)
    if early:
        for each in contenders:
            each.early, each.runs = each.runs, []
    return same


def rate_of(runs: Sequence[Run]) -> float:
    """Tokens a second."""
    return sum(run.counted for run in runs) / sum(run.seconds for run in runs)


def median_errors(contenders: Sequence[Contender]) -> dict[str, float | None]:
    """Return how far predicted times of steps were off, medians over runs."""
    errors = [error for each in contenders for error in each.errors("prediction_error")]
    return {"prediction_error": median(errors) if errors else None}
