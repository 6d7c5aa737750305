"""Speculation at the size of 30 billion parameters, where no model says anything sensible.

A random model's routing has no locality and its drafts are never right. So each token goes where a
trace with published locality sends it (`benchmarks.offload_routing`), in drafts and verifications
alike, and is accepted as often as the shipped model accepts at that position of a draft with the
same share of residents (`benchmarks.speculation_grid`). Reads, arithmetic and the engine are real;
what is accepted, and that the tokens mean nothing, is not. Confidence says nothing here: drafts are
as long as was planned.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload_models import Target, targets
from benchmarks.offload_routing import Trace, published_trace
from benchmarks.speculation_runs import MAX_DEPTH, PROMPT, Contender, take_turns
from benchmarks.speculation_tables import describe
from moe import MoE
from moe.sampling import Token
from moe.selection import find_selectors
from moe.sequence import RunningSequence
from moe.speculate.control.make import make_controller
from moe.speculate.draft import Controller, Draft, Mode, Trial
from moe.speculate.elastic import ElasticDrafts, _Pending
from moe.speculate.fixed import FixedDepth
from moe.speculate.layers import DraftLayers
from moe.speculate.speculator import Speculator
from routing import Policy, PolicyChain, Routing, RoutingContext

TOKENS = 24
SPAN = 512
"""Tokens of the trace that a sequence has for itself."""
MODES = (Mode("elastic", bits=4), Mode("elastic", bits=2))
KV_TOKENS = 4096


class Replayed(Policy):
    """A routing policy: rows go where the trace sends their tokens.

    Attributes:
        rows: tokens of the trace that the next pass reads.
    """

    spec = "replayed"

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.rows: list[int] = []
        self._draw = np.random.default_rng(0)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        return self.at(context.layer, routing)

    def at(self, layer: int, routing: Routing) -> Routing:
        rows: Any = self.rows
        if len(rows) != routing.num_tokens:  # a prompt
            rows = self._draw.integers(len(self.trace), size=routing.num_tokens)
        return Routing(torch.from_numpy(self.trace[rows, layer]), routing.weights)


class ReplayedLayers(DraftLayers):
    """Draft layers whose own routing is the trace's."""

    replayed: Replayed

    def _run(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return super()._run(layer, rows, self.replayed.at(layer, routing))


class ReplayedDrafts(ElasticDrafts):
    """Drafts that read the trace on from where their sequences are."""

    def __init__(self, model: MoE, layers: ReplayedLayers) -> None:
        super().__init__(model._trunk, layers)
        self.replayed = layers.replayed
        self.places: dict[int, int] = {}

    def _pass(self, drafts: Sequence[_Pending]) -> None:
        self.replayed.rows = [self.places[id(d.work.cache)] + len(d.tokens) for d in drafts]
        super()._pass(drafts)


class WithoutConfidence:
    """A controller that is not asked about single tokens."""

    def __init__(self, controller: Controller) -> None:
        self._own = controller
        self.plan, self.observe = controller.plan, controller.observe
        self.rests, self.figures, self.took = controller.rests, controller.figures, controller.took

    def goes_on(self, _mode: Mode, _confidence: Sequence[float]) -> bool:
        return True

    def keep(self, _mode: Mode, confidence: Sequence[float]) -> int:
        return len(confidence)


class ReplayedSpeculator(Speculator):
    """Accepts by chance.

    Args:
        rates: of each mode, acceptance by position.
    """

    def __init__(
        self,
        controller: Controller,
        drafts: ReplayedDrafts,
        rates: dict[Mode, Sequence[float]],
    ) -> None:
        super().__init__(WithoutConfidence(controller), drafts, [], MAX_DEPTH)
        self._drafts, self._rates = drafts, rates
        self._luck = np.random.default_rng(1).random(len(drafts.replayed.trace))
        self._starts: dict[RunningSequence, int] = {}

    def propose(self, sequences: Sequence[RunningSequence], spare: float) -> list[Draft]:
        self._starts = {s: self._starts.get(s, SPAN * i) for i, s in enumerate(sequences)}
        places = [self._starts[s] + len(s.token_ids) for s in sequences]
        self._drafts.places = {id(s.cache): p for s, p in zip(sequences, places, strict=True)}
        drafts = super().propose(sequences, spare)
        self._drafts.replayed.rows = [
            place + index
            for place, draft in zip(places, drafts, strict=True)
            for index in range(len(draft.tokens) + 1)
        ]
        return drafts

    def accept(self, sequence: RunningSequence, draft: Draft, logits_TV: Tensor) -> list[Token]:
        place, accepted, drafted = self._drafts.places[id(sequence.cache)], 0, len(draft.tokens)
        if draft.mode is not None:
            rates = self._rates[draft.mode]
            while accepted < drafted and self._luck[place + accepted] < rates[accepted]:
                accepted += 1
        tokens = [sequence.sampler.sample(row) for row in logits_TV[: accepted + 1]]
        self._tokens += len(tokens)
        if not self._resting:
            self._trials.append(Trial(sequence, draft.mode, drafted, accepted))
        return tokens


class RandomPrompts:
    """Prompts that say nothing."""

    def __init__(self, model: MoE) -> None:
        self._draw, self._size = random.Random(0), model.codec.vocab_size

    def take(self, count: int) -> list[list[int]]:
        return [[self._draw.randrange(self._size) for _ in range(PROMPT)] for _ in range(count)]


def rates_at(cells: Sequence[dict[str, Any]], residency: float) -> dict[Mode, Sequence[float]]:
    """Acceptance by position of each mode, as measured at the nearest share of residents.

    The store has 4 bits. A draft of all of them is held to be like one of all 8 bits of the shipped
    model, and one of 2 bits like one of 2 bits: that is further from its target, so less is taken.
    """
    greedy = [
        c for c in cells if c["way"] == "planes" and c["selection"] == "frequency"
        and c["temperature"] == cells[0]["temperature"]
    ]  # fmt: skip
    found: dict[Mode, Sequence[float]] = {}
    for mode in MODES:
        bits = max if mode.bits == 4 else min
        wanted = bits(c["bits"] for c in greedy)
        own = [c for c in greedy if c["bits"] == wanted]
        cell = min(own, key=lambda c: abs(c["resident"] - residency))
        rates = list(cell["by_position"])
        found[mode] = rates + rates[-1:] * (MAX_DEPTH - len(rates))
    return found


def contenders(
    model: MoE, rates: dict[Mode, Sequence[float]], depths: Sequence[int], trace: Trace
) -> list[Contender]:
    """No drafts, the controller, and fixed depths; all follow one trace."""
    policy = Replayed(trace)
    model._experts.policies = PolicyChain((policy,))
    selectors = [found.selector for found in find_selectors(model._trunk)]

    def drafts() -> ReplayedDrafts:
        layers = ReplayedLayers(model._experts.layers, model._loaded.backend.forward, selectors)
        layers.replayed = policy
        return ReplayedDrafts(model, layers)

    def made(controller: Controller) -> ReplayedSpeculator:
        return ReplayedSpeculator(controller, drafts(), rates)

    auto = make_controller(model._trunk, model._experts, MODES, MAX_DEPTH)
    return [
        Contender("none", made(FixedDepth(MODES[0], 0)), 0),
        Contender("auto", made(auto), None),
        *(Contender(MODES[0].name, made(FixedDepth(MODES[0], depth)), depth) for depth in depths),
    ]


def replayed(
    cells: Sequence[dict[str, Any]], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], float | None]:
    """Points of the large store, and the mean error of predicted times; none without the store."""
    found: list[dict[str, Any]] = []
    errors: list[float] = []
    for target in targets(["30b"]):
        for residency in (r for r in options.residency if r < 1):
            model = _load(target, residency)
            layers = model._experts.layers
            top_k = model.config.get_text_config().num_experts_per_tok
            for batch in (b for b in options.batch if b <= 4):
                count = SPAN * (batch + 1)
                trace = published_trace(count, len(layers), layers[0].num_experts, top_k)
                own = contenders(model, rates_at(cells, residency), options.depths, trace)
                prompts: Any = RandomPrompts(model)
                settle = Contender("auto", own[1].drafts, None)
                take_turns(model, [settle], prompts, batch, 2 * TOKENS, 1.0, 1)
                take_turns(model, own, prompts, batch, TOKENS, 1.0, 1)
                where = {"batch": batch, "residency": residency, "temperature": 1.0}
                found += describe(own, where)
                errors += own[1].errors()
                print(where, [f"{c.name}{c.depth or ''} {c.rate:.2f}" for c in own], flush=True)
            model.close()
    return found, median(errors) if errors else None


def _load(target: Target, residency: float) -> MoE:
    settings = target.settings(residency, KV_TOKENS)
    settings["offload"] = {"hot_set": False}
    return MoE.from_pretrained(target.store, settings, model={"expert_bits": 4})
