"""Speculation within a step: who drafts, how far, and what stands of it.

The runner calls `is_plain` before a step's lanes and `finish` behind them; where a step is not
plain, `propose` as well, and `accept` for each sequence with the logits that they gave. Whatever is
drafted, tokens are those of the model itself (`verify`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan
from typing import Any

from torch import Tensor

from moe.engine.sequence import RunningSequence
from moe.sampling.sampler import Token
from moe.speculate.control.report import Report
from moe.speculate.draft import PLAIN, Choice, Controller, Draft, Mode, Round, Trial
from moe.speculate.elastic import ElasticDrafts
from moe.speculate.model_free import ModelFree
from moe.speculate.rests import Rests
from moe.speculate.verify import verify
from routing.predict import Forecast

SURE = 0.5
"""Confidence of a model-free draft with which nobody else is asked."""


class Speculator:
    """Drafts for running sequences and verifies.

    Args:
        controller: decides.
        elastic: drafts by the model itself; None where no mode wants it.
        model_free: drafts that cost nothing, all asked in every step.
        max_depth: tokens of a draft at most.

    Attributes:
        report: what came of it.
        forecast: the experts that the verification will need, as the drafts of all its sequences
            have found; None where they have not.
    """

    def __init__(
        self,
        controller: Controller,
        elastic: ElasticDrafts | None,
        model_free: Sequence[ModelFree],
        max_depth: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.controller, self.report = controller, Report()
        self.forecast: Forecast | None = None
        self._elastic, self._model_free = elastic, list(model_free)
        self._max_depth, self._clock = max_depth, clock
        self._start = self._drafted = self._began = 0.0
        self._batch = self._tokens = 0
        self._rests = Rests(self._model_free, max_depth)
        self._resting = self._plain = False
        self._offered: list[list[Draft]] = []
        self._draft_bytes, self._draft_rows = 0, list[int]()
        self._trials: list[Trial] = []
        self._confidence: dict[RunningSequence, tuple[float, ...]] = {}

    def is_plain(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether a step of these is plain decoding: nobody looks for drafts, or there are none.
        Such steps are to cost what they would without speculation."""
        self._start, self._batch = self._clock(), len(sequences)
        self._resting = self._plain = self._rests.begin(self.controller, sequences)
        if self._resting:
            return True
        self._offered = [self._offers(sequence) for sequence in sequences]
        self._plain = not any(self._offered) and self.controller.needs_offers(self._batch)
        return self._plain

    def propose(self, sequences: Sequence[RunningSequence], spare: float) -> list[Draft]:
        """A draft for each running sequence; ``spare``: tokens that keys and values have room for,
        beyond one of each sequence."""
        self.forecast, self._tokens = None, 0
        self._trials, self._draft_rows = [], []
        bytes_before = 0 if self._elastic is None else self._elastic.layers.bytes_read
        limits = self._limits(sequences, spare)
        choices = self.controller.plan(sequences, limits, self._offered)
        drafts = [_taken(*own) for own in zip(choices, self._offered, strict=True)]
        self._confidence = {}
        self._draft_elastically(sequences, choices, drafts)
        self._began = self._clock()
        self._drafted = self._began - self._start
        if self._elastic is not None:
            self._draft_bytes = self._elastic.layers.bytes_read - bytes_before
        return drafts

    def accept(self, sequence: RunningSequence, draft: Draft, logits_TV: Tensor) -> list[Token]:
        """The next tokens of a sequence, at least one; see `verify`."""
        tokens = verify(sequence.sampler, draft, logits_TV)
        self._tokens, accepted = self._tokens + len(tokens), len(tokens) - 1
        if draft.tokens:
            for source in self._model_free:
                source.learn(sequence, draft, accepted, logits_TV)
        confidence = self._confidence.get(sequence, draft.confidence)
        drafted = len(draft.tokens)
        self._trials.append(Trial(sequence, draft.mode, drafted, accepted, confidence))
        return tokens

    def finish(self, alone: bool) -> None:
        """The step is over; ``alone`` if no prompt was read in it."""
        if self._plain:
            seconds = self._clock() - self._start
            self.report.plain_step(self._batch, self._resting)
            if self._resting:
                self._rests.over(seconds if alone else nan)
            elif alone:
                self.controller.passed(self._batch, seconds)
            return
        self._tell(alone)
        if alone and self._tokens >= self._batch:
            self.controller.took(self._batch, self._tokens, self._clock() - self._start)

    def _tell(self, alone: bool) -> None:
        round = Round(
            trials=tuple(self._trials),
            rows=sum(trial.drafted + 1 for trial in self._trials),
            draft_rows=tuple(self._draft_rows),
            draft_seconds=self._drafted,
            verify_seconds=self._clock() - self._began,
            draft_bytes=self._draft_bytes,
            alone=alone,
        )
        self.report.observe(round)
        self.controller.observe(round)

    def figures(self) -> dict[str, Any]:
        """What came of it, and what decides, for JSON."""
        return {**self.report.figures(), "control": self.controller.figures()}

    def _offers(self, sequence: RunningSequence) -> list[Draft]:
        """What model-free modes have to say."""
        limit = self._limit(sequence)
        if limit <= 0:
            return []
        offers = []
        for source in self._model_free:
            draft = source.offer(sequence, limit)
            if draft.tokens:
                offers.append(draft)
                if draft.confidence[0] >= SURE:
                    break
        return offers

    def _limits(self, sequences: Sequence[RunningSequence], spare: float) -> list[int]:
        """Tokens that each sequence may draft: the one behind them is the model's own."""
        limits = []
        for sequence in sequences:
            limits.append(int(max(0, min(self._limit(sequence), spare))))
            spare -= limits[-1]
        return limits

    def _limit(self, sequence: RunningSequence) -> int:
        left = sequence.max_new_tokens - len(sequence.token_ids) - 1
        return min(self._max_depth, left)

    def _draft_elastically(
        self,
        sequences: Sequence[RunningSequence],
        choices: Sequence[Choice],
        drafts: list[Draft],
    ) -> None:
        """Fill in the drafts of elastic choices, those of one mode in shared passes."""
        by_mode: dict[Mode, list[int]] = {}
        for index, choice in enumerate(choices):
            if choice.mode is not None and choice.mode.source == "elastic" and choice.depth:
                by_mode.setdefault(choice.mode, []).append(index)
        for mode, chosen in by_mode.items():
            assert self._elastic is not None
            made = self._elastic.draft(
                mode,
                [sequences[index] for index in chosen],
                [choices[index].depth for index in chosen],
                self.controller.goes_on,
            )
            self._draft_rows += self._elastic.rows
            if len(chosen) == len(sequences):
                self.forecast = self._elastic.layers.forecast()
            for index, draft in zip(chosen, made, strict=True):
                self._confidence[sequences[index]] = draft.confidence
                if not any(draft.proposals):
                    draft = draft.first(self.controller.keep(mode, draft.confidence))
                drafts[index] = draft


def _taken(choice: Choice, offers: Sequence[Draft]) -> Draft:
    """The beginning of the offer that was chosen, if one was."""
    chosen = (offer for offer in offers if offer.mode == choice.mode)
    return next(chosen, PLAIN).first(choice.depth)
