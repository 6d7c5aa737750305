"""Decoding with drafts: what speculates in a given way, and what a decoding was like."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.offload_models import Target
from benchmarks.texts import TEXTS, heldout
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.sampling.batch import Token
from moe.settings import SpeculationSettings
from moe.speculate import Speculator, enable_speculation
from moe.speculate.draft import DraftRule, FixedDepth, Mode

MAX_DEPTH = 6
PROMPT = 64
KV_TOKENS = 8192
SKIP = 10_000
"""Tokens of held-out text before the prompts: what comes first may have been learnt from."""


def load(target: Target, residency: float) -> MoE:
    """The model of a store with a share of its experts in memory, where drafts say what to read."""
    settings = target.settings(residency, KV_TOKENS)
    settings |= {"offload": {"hot_set": False}, "speculation": {"mode": "elastic"}}
    return MoE.from_pretrained(target.store, settings)


def speculator(
    model: MoE, mode: str = "auto", *, rules: Sequence[DraftRule] = (), **settings: Any
) -> Speculator:
    """Return what drafts for a model; raises ValueError, with the reason, where nothing can."""
    loaded = model._loaded
    given: dict[str, Any] = {"mode": mode, "max_depth": MAX_DEPTH, **settings}
    made = enable_speculation(
        SpeculationSettings(**given),
        model.backbone,
        model.experts,
        loaded.backend.forward,
        rules=rules,
    )
    if made.speculator is None:
        raise ValueError(made.reason)
    return made.speculator


def fixed(model: MoE, mode: Mode, depth: int) -> Speculator:
    """Always drafts in one elastic mode, and so far."""
    own = speculator(model, "elastic", bits=mode.bits, experts=mode.experts)
    own.controller = FixedDepth(mode, depth)
    return own


class Prompts:
    """Beginnings of held-out texts of the three domains in turn; other ones each time."""

    def __init__(self, model: MoE, text: str | None = None) -> None:
        names = TEXTS if text is None else (text,)
        self._texts = [model.codec.encode(heldout(name))[SKIP:] for name in names]
        self._next = 0

    def take(self, count: int) -> list[list[int]]:
        found = []
        for index in range(self._next, self._next + count):
            ids = self._texts[index % len(self._texts)]
            start = (index // len(self._texts) * 997) % (len(ids) - PROMPT)
            found.append(ids[start : start + PROMPT])
        self._next += count
        return found


class Texts:
    """Prompts, and what the shipped model has said behind them.

    Attributes:
        current: what it has said behind each of the prompts that were last given.
    """

    def __init__(self, texts: Sequence[tuple[list[int], list[int]]]) -> None:
        self._texts, self._next = list(texts), 0
        self.current: list[list[int]] = []

    def take(self, count: int) -> list[list[int]]:
        own = [self._texts[(self._next + index) % len(self._texts)] for index in range(count)]
        self._next += count
        self.current = [said for _, said in own]
        return [prompt for prompt, _ in own]

    def first(self, prompt: Sequence[int]) -> int:
        """Return what comes behind a prompt."""
        return next((said[0] for ids, said in self._texts if ids == prompt), 0)


@dataclass
class Run:
    """What one decoding was like.

    Attributes:
        tokens: by sequence.
        counted: tokens generated before any sequence ended, in ``seconds``.
        memory_bytes: of experts that the model's own passes read then.
        draft_bytes: that draft passes read.
        disk_bytes: read from disk.
        steps: in ``seconds``: of each its kind (`kind_of`), tokens and seconds.
    """

    tokens: list[list[int]]
    counted: int = 0
    seconds: float = 0.0
    memory_bytes: float = 0.0
    draft_bytes: float = 0.0
    disk_bytes: float = 0.0
    steps: list[tuple[str, int, float]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def decode(
    model: MoE,
    drafts: Speculator | None,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
) -> Run:
    """Decode until the first sequence ends; the rest, for the comparison of tokens, untimed."""
    engine = model.engine()
    assert isinstance(engine, Engine)
    engine.runner._speculator = drafts  # type: ignore[attr-defined]
    if (offloaded := model._loaded.offloaded) is not None:  # plain decoding does not look ahead
        model.experts._prefetcher = None if drafts is None else offloaded.prefetcher
    params = SamplingParams(
        max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True, seed=seed
    )
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    while len(engine.scheduler.running) < len(groups):
        engine.step()
    model.reset_stats()
    if drafts is not None:
        drafts.report.reset()
    run = Run([])
    last = clock()
    while len(engine.scheduler.running) == len(groups):
        events = engine.step()
        before, last = last, clock()
        tokens = sum(isinstance(getattr(event, "token", None), Token) for _, event in events)
        run.steps.append((kind_of(drafts), tokens, last - before))
    run.counted = sum(tokens for _, tokens, _ in run.steps)
    run.seconds = sum(seconds for _, _, seconds in run.steps)
    stats = model.stats()
    run.memory_bytes = stats["expert_bytes_read"]
    run.disk_bytes = 0.0 if stats["offload"] is None else stats["offload"]["bytes_read"]
    if drafts is not None:
        run.figures = drafts.figures()
        run.draft_bytes = sum(m["draft_bytes"] for m in run.figures["modes"].values())
    while not engine.idle:
        engine.step()
    run.tokens = [group.sequences[0].token_ids for group in groups]
    return run


def kind_of(drafts: Speculator | None) -> str:
    """Of the last step."""
    if drafts is None:
        return "plain"
    if drafts._trials is None:
        return "rest" if drafts._plain.resting else "look"
    return "elastic" if drafts._draft_rows else "offered"
