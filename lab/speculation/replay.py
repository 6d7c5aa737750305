"""Speculation at the size of 30 billion parameters, where no model says anything sensible.

A random model's routing has no locality and its drafts are never right. So each token goes where a
trace with published locality sends it (`benchmarks.offload_routing`), in drafts and verifications
alike, and the model says what the shipped model has said behind the same prompt: its logits are
replaced by that. So n-grams and recycling find what they would find in that text, and a token that
the model drafts itself is right as often as the shipped model's is at that position of a draft with
the same share of residents (`lab.speculation.grid`). Reads, arithmetic and the engine are
real; what is said, and hence what is accepted, is the shipped model's. Confidence says nothing
here: drafts by the model are as long as was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload_routing import Trace
from benchmarks.speculation_runs import MAX_DEPTH, Texts
from moe import MoE
from moe.kv.cache import KVCache
from moe.network.backbone import Forward
from moe.network.packed_pass import Work
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Choice, Controller, Draft, Mode, Round, Source, Stop
from moe.speculate.elastic import DraftLayers, ElasticDrafts
from moe.speculate.ngram import ModelFree
from moe.speculate.passes import PassDrafts, PendingDraft
from moe.speculate.speculator import Speculator
from routing import Routing, RoutingContext, RoutingPolicy

SPAN = 512
"""Tokens of the trace that a sequence has for itself."""


class Replayed(RoutingPolicy):
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


class Says:
    """Replaces what the model says; see `moe.network.backbone.Backbone.reader`.

    Attributes:
        rates: acceptance by position of the draft that is being made; None where the model reads.
        drafted: tokens of it so far.
    """

    name = "says"

    def __init__(self, texts: Texts, replayed: Replayed) -> None:
        self.rates: Sequence[float] | None = None
        self.drafted: list[int] = []
        self._texts, self._replayed = texts, replayed
        self._luck = np.random.default_rng(1).random(len(replayed.trace))

    @property
    def cache_type(self) -> type[KVCache]:
        return KVCache

    def read(self, forward: Forward, work: Sequence[Work]) -> list[Tensor]:
        logits, places = forward(work), iter(self._replayed.rows)
        if sum(len(item.token_ids) for item in work) != len(self._replayed.rows):
            for item, rows in zip(work, logits, strict=True):  # prompts
                _say(rows[-1], self._texts.first(item.token_ids))
            return logits
        for index, rows in enumerate(logits):
            for row in rows:
                place = next(places)
                token = self._texts.current[place // SPAN][place % SPAN]
                _say(row, (token + self._is_wrong(index, place)) % len(row))
        return logits

    def _is_wrong(self, index: int, place: int) -> bool:
        if self.rates is None:
            return False
        return bool(self._luck[place] >= self.rates[self.drafted[index]])


def _say(logits_V: Tensor, token: int) -> None:
    logits_V[token] = logits_V.max() + 20


class ReplayedDrafts(ElasticDrafts):
    """Drafts that read the trace on from where their sequences are.

    Args:
        rates: of each mode, acceptance by position.
    """

    def __init__(
        self,
        model: MoE,
        layers: ReplayedLayers,
        says: Says,
        rates: Mapping[Mode, Sequence[float]],
    ) -> None:
        super().__init__(model.backbone, layers, model.experts.prefetch_early)
        self.replayed, self._says, self._rates = layers.replayed, says, rates
        self.places: dict[int, int] = {}

    def draft(
        self,
        mode: Mode,
        sequences: Sequence[RunningSequence],
        depths: Sequence[int],
        stop: Stop,
    ) -> list[Draft]:
        self._says.rates = self._rates[mode]
        try:
            return super().draft(mode, sequences, depths, stop)
        finally:
            self._says.rates = None

    def _run(self, drafts: Sequence[PendingDraft]) -> list[Tensor]:
        self.replayed.rows = [self.places[id(d.work.cache)] + len(d.tokens) for d in drafts]
        self._says.drafted = [len(d.tokens) for d in drafts]
        return super()._run(drafts)


class WithoutConfidence(Controller):
    """A controller that is not asked about single tokens."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def plan(self, *step: Any) -> Sequence[Choice] | None:
        return self._controller.plan(*step)

    def observe(self, round: Round) -> None:
        self._controller.observe(round)

    def rests(self, batch: int) -> int:
        return self._controller.rests(batch)

    def rested(self, *steps: Any) -> None:
        self._controller.rested(*steps)

    def figures(self) -> dict[str, Any] | None:
        return self._controller.figures()


class ReplayedSpeculator(Speculator):
    """Follows the trace."""

    def __init__(
        self, controller: Controller, drafts: ReplayedDrafts, model_free: Sequence[ModelFree[Any]]
    ) -> None:
        passes: dict[Source, PassDrafts] = {"elastic": drafts}
        super().__init__(WithoutConfidence(controller), passes, model_free, MAX_DEPTH)
        self._drafts = drafts
        self._starts: dict[RunningSequence, int] = {}

    def propose(self, sequences: Sequence[RunningSequence], spare: float) -> list[Draft] | None:
        self._starts = {s: self._starts.get(s, SPAN * i) for i, s in enumerate(sequences)}
        places = [self._starts[s] + len(s.token_ids) for s in sequences]
        self._drafts.places = {id(s.cache): p for s, p in zip(sequences, places, strict=True)}
        drafts = super().propose(sequences, spare)
        self._drafts.replayed.rows = [
            place + index
            for place, draft in zip(places, drafts or [PLAIN] * len(places), strict=True)
            for index in range(len(draft.tokens) + 1)
        ]
        return drafts
