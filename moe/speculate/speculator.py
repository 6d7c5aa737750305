"""Speculation within a step: who drafts, how far, and what stands of it.

The runner calls `propose` before a step's lanes and `finish` behind them; where there are drafts,
`accept` as well, for each sequence with the logits that they gave. Whatever is drafted, tokens are
those of the model itself (`verify`).
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
        self._start = self._began = 0.0
        self._sequences: Sequence[RunningSequence] = ()
        self._rests = Rests(self._model_free, max_depth)
        self._resting = False
        self._draft_bytes, self._draft_rows = 0, list[int]()
        self._trials: list[Trial] | None = None
        self._confidence: dict[RunningSequence, tuple[float, ...]] = {}

    def propose(self, sequences: Sequence[RunningSequence], spare: float) -> list[Draft] | None:
        """A draft for each running sequence. None where the step is plain decoding: nobody looks
        for drafts, or none are worth it. It is to cost what it would without speculation.

        Args:
            spare: tokens that keys and values have room for, beyond one of each sequence.
        """
        self._start, self._sequences = self._clock(), sequences
        self.forecast = self._trials = None
        self._resting = self._rests.begin(self.controller, sequences)
        if self._resting:
            return None
        self._confidence, self._draft_rows, self._draft_bytes = {}, [], 0
        offered = [self._offers(sequence) for sequence in sequences]
        choices = self.controller.plan(sequences, self._limits(sequences, spare), offered)
        drafts = [_taken(*own) for own in zip(choices, offered, strict=True)]
        self._draft_elastically(sequences, choices, drafts)
        self._began = self._clock()
        if not self._draft_rows and not any(draft.tokens for draft in drafts):
            return None
        self._trials = []
        return drafts

    def accept(self, sequence: RunningSequence, draft: Draft, logits_TV: Tensor) -> list[Token]:
        """The next tokens of a sequence, at least one; see `verify`."""
        assert self._trials is not None
        tokens = verify(sequence.sampler, draft, logits_TV)
        accepted = len(tokens) - 1
        if draft.tokens:
            for source in self._model_free:
                source.learn(sequence, draft, accepted, logits_TV)
        confidence = self._confidence.get(sequence, draft.confidence)
        drafted = len(draft.tokens)
        self._trials.append(Trial(sequence, draft.mode, drafted, accepted, confidence))
        return tokens

    def finish(self, alone: bool) -> None:
        """The step is over; ``alone`` if no prompt was read in it."""
        now = self._clock()
        if self._resting:
            self.report.rest(len(self._sequences))
            self._rests.over(now - self._start if alone else nan)
            return
        trials = self._trials
        if trials is None:
            trials = [Trial(sequence, None, 0, 0) for sequence in self._sequences]
        round = Round(
            trials=tuple(trials),
            rows=sum(trial.drafted + 1 for trial in trials),
            draft_rows=tuple(self._draft_rows),
            draft_seconds=self._began - self._start,
            verify_seconds=now - self._began,
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
            before = self._elastic.layers.bytes_read
            made = self._elastic.draft(
                mode,
                [sequences[index] for index in chosen],
                [choices[index].depth for index in chosen],
                self.controller.goes_on,
            )
            self._draft_rows += self._elastic.rows
            self._draft_bytes += self._elastic.layers.bytes_read - before
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
