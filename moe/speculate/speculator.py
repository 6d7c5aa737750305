"""Speculation within a step: draft, verify, and count the results.

The runner calls `Speculator.propose` before a step's lanes and `finish` after them; with drafts it
also calls `accept`, for each sequence with what verification gave. Tokens are always the model's
own (`moe.sampling.sampler.verify`): at temperature 0, with a seed, or for a draft that was not
drawn, the model chooses its token as without a draft, and drafted tokens are accepted up to the
first difference; a drawn draft goes through rejection sampling, which keeps the model's
distribution exact.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

from moe.sampling.sampler import Verified
from moe.sequence import RunningSequence
from moe.speculate.draft import (
    BY_PASSES,
    PLAIN,
    Choice,
    Controller,
    Draft,
    Mode,
    Plain,
    Round,
    Source,
    Trial,
)
from moe.speculate.ngram import ModelFree, Offers
from moe.speculate.passes import PassDrafts
from routing.predict import Forecast

TOGETHER = 4, 256
"""Plain steps that are reported together at first, and at most: twice as many each time while the
number of sequences stays and nothing is drafted."""
LOOK = 2.0
"""A draft lookup costs twice its own time: it also evicts the next pass's CPU caches."""


class Speculator:
    """Drafts for running sequences and verifies.

    Args:
        controller: decides how each step drafts.
        passes: by their source, drafts by passes of a network.
        model_free: sources of drafts that need no pass of the model.
        max_depth: most tokens of a draft.

    Attributes:
        report: counts steps and tokens.
        forecast: the experts that the verification will need, according to the routing of this
            step's draft passes; None unless all sequences were drafted elastically in one mode.
    """

    def __init__(
        self,
        controller: Controller,
        passes: Mapping[Source, PassDrafts],
        model_free: Sequence[ModelFree[Any]],
        max_depth: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.controller, self.report = controller, Report()
        self.forecast: Forecast | None = None
        self._passes, self._offers = passes, Offers(model_free)
        self._max_depth, self._clock = max_depth, clock
        self._start = self._began = 0.0
        self._sequences: Sequence[RunningSequence] = ()
        self._plain = PlainSteps()
        self._draft_bytes, self._draft_rows = 0, list[int]()
        self._trials: list[Trial] | None = None
        self._confidence: dict[RunningSequence, tuple[float, ...]] = {}

    def propose(self, sequences: Sequence[RunningSequence], spare: float) -> list[Draft] | None:
        """A draft for each running sequence. None for plain decoding: lookups rest, or no draft
        pays. Such a step costs what it would without speculation.

        Args:
            spare: tokens that the KV cache has room for, beyond one of each sequence.
        """
        self._began = self._start = self._clock()
        self._sequences, self.forecast, self._trials = sequences, None, None
        if self._plain.begin(self.controller, len(sequences)):
            return None
        limits = self._limits(sequences, spare)
        offered = self._offers.of(sequences, limits)
        choices = self.controller.plan(sequences, limits, offered)
        if choices is None:
            self._began = self._clock()
            return None
        self._confidence, self._draft_rows, self._draft_bytes = {}, [], 0
        drafts = [_taken(*own) for own in zip(choices, offered, strict=True)]
        self._draft_by_passes(sequences, choices, drafts)
        self._began = self._clock()
        if not self._draft_rows and not any(draft.tokens for draft in drafts):
            return None
        self._trials = []
        return drafts

    def accept(self, sequence: RunningSequence, draft: Draft, verified: Verified) -> None:
        """The next tokens of a sequence are known, at least one."""
        assert self._trials is not None
        accepted = len(verified.tokens) - 1
        if draft.tokens:
            for source in self._offers.sources:
                source.learn(draft, accepted, verified)
        confidence = self._confidence.get(sequence, draft.confidence)
        drafted = len(draft.tokens)
        self._trials.append(Trial(sequence, draft.mode, drafted, accepted, confidence))

    def finish(self, alone: bool) -> None:
        """The step is over; ``alone`` means that no prompt was read in it."""
        now, trials = self._clock(), self._trials
        if trials is None:
            self.report.plainly(len(self._sequences), self._plain.resting)
            self._plain.over(now - self._began if alone else nan, self._began - self._start)
            return
        round = Round(
            trials=tuple(trials),
            rows=sum(trial.drafted + 1 for trial in trials),
            draft_rows=tuple(self._draft_rows),
            draft_seconds=self._began - self._start,
            verify_seconds=now - self._began,
            draft_bytes=self._draft_bytes,
            alone=alone,
        )
        self._plain.drafted()
        self.report.observe(round)
        self.controller.observe(round)

    def figures(self) -> dict[str, Any]:
        """The report and the controller's figures, for JSON."""
        return {**self.report.figures(), "control": self.controller.figures()}

    def _limits(self, sequences: Sequence[RunningSequence], spare: float) -> list[int]:
        """Most tokens that each sequence may draft: verification adds one of the model's own."""
        limits = []
        for sequence in sequences:
            left = sequence.max_new_tokens - len(sequence.token_ids) - 1
            limits.append(int(max(0, min(self._max_depth, left, spare))))
            spare -= limits[-1]
        return limits

    def _draft_by_passes(
        self,
        sequences: Sequence[RunningSequence],
        choices: Sequence[Choice],
        drafts: list[Draft],
    ) -> None:
        """Fill in the drafts that need passes, those of one mode in shared ones."""
        by_mode: dict[Mode, list[int]] = {}
        for index, choice in enumerate(choices):
            if choice.mode is not None and choice.mode.source in self._passes and choice.depth:
                by_mode.setdefault(choice.mode, []).append(index)
        for mode, chosen in by_mode.items():
            drafting = self._passes[mode.source]
            before = drafting.bytes_read
            made = drafting.draft(
                mode,
                [sequences[index] for index in chosen],
                [choices[index].depth for index in chosen],
                self.controller.stop(mode),
            )
            self._draft_rows += drafting.rows
            self._draft_bytes += drafting.bytes_read - before
            if len(chosen) == len(sequences):
                self.forecast = drafting.forecast()
            for index, draft in zip(chosen, made, strict=True):
                self._confidence[sequences[index]] = draft.confidence
                if not any(draft.proposals):
                    draft = draft.first(self.controller.keep(mode, draft.confidence))
                drafts[index] = draft


def _taken(choice: Choice, offers: Sequence[Draft]) -> Draft:
    """The chosen part of an offer; `PLAIN` if no offer was chosen."""
    chosen = (offer for offer in offers if offer.mode == choice.mode)
    return next(chosen, PLAIN).first(choice.depth)


class PlainSteps:
    """Collects plain steps, and reports several together to the controller.

    Attributes:
        resting: this step makes no lookup.
    """

    def __init__(self) -> None:
        self.resting = False
        self._batch = self._left = self._looks = 0
        self._looking, self._together = 0.0, TOGETHER[0]
        self._seconds: list[float] = []

    def begin(self, controller: Controller, batch: int) -> bool:
        """Start a step of this many sequences; True if it makes no lookup."""
        if self._left and batch == self._batch:
            self._left -= 1
            return True
        if batch != self._batch or len(self._seconds) >= self._together:
            self._report(controller, batch)
        self._left = controller.rests(batch)
        self.resting = self._left > 0
        self._left -= self.resting
        return self.resting

    def over(self, seconds: float, looking: float) -> None:
        """A plain step is over, nan seconds if it read a prompt; its lookup took ``looking``."""
        self._seconds.append(seconds)
        if not self.resting:
            self._looks, self._looking = self._looks + 1, self._looking + LOOK * looking

    def drafted(self) -> None:
        """A step had drafts: report the next plain ones soon, to compare their times."""
        self._together = 2 * TOGETHER[0]

    def _report(self, controller: Controller, batch: int) -> None:
        if self._seconds:
            controller.rested(Plain(self._batch, self._seconds, self._looks, self._looking))
        self._together = (
            min(2 * self._together, TOGETHER[1]) if batch == self._batch else TOGETHER[0]
        )
        self._batch, self._seconds, self._looks, self._looking = batch, [], 0, 0.0


class Report:
    """Counts steps and tokens; other threads may read it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin at zero."""
        self.steps = self.sequences = self.tokens = self.rows = 0
        self.rested = self.plain = 0  # steps without a lookup; tokens of plain steps
        self.draft_seconds = self.verify_seconds = 0.0
        self.depths: Counter[int] = Counter()
        self.modes: dict[str, ModeRecord] = {}

    def observe(self, round: Round) -> None:
        """A step is over."""
        self.steps += 1
        self.sequences += len(round.trials)
        self.rows += round.rows
        self.draft_seconds += round.draft_seconds
        self.verify_seconds += round.verify_seconds
        for trial in round.trials:
            self.tokens += trial.accepted + 1
            self.depths[trial.drafted] += 1
            if trial.mode is not None and trial.drafted:
                self._record(trial.mode.name).drafts[trial.drafted, trial.accepted] += 1
        if not round.draft_rows:
            return
        passes = {t.mode.name for t in round.trials if t.mode and t.mode.source in BY_PASSES}
        for name in passes:
            self._record(name).draft_bytes += round.draft_bytes // len(passes)

    def plainly(self, batch: int, resting: bool) -> None:
        """A plain step of this many sequences is over; ``resting``: without a lookup."""
        self.steps += 1
        self.rested += resting
        self.plain += batch

    def figures(self) -> dict[str, Any]:
        """For JSON. ``tokens_per_verification`` is of one sequence; 1 without drafts."""
        modes = {name: record.as_dict() for name, record in sorted(self.modes.items())}
        depths, tokens = self.depths + Counter({0: self.plain}), self.tokens + self.plain
        return {
            "steps": self.steps,
            "tokens": tokens,
            "rows": self.rows + self.plain,
            "rested_steps": self.rested,
            "tokens_per_verification": tokens / max(self.sequences + self.plain, 1),
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "depths": {str(depth): count for depth, count in sorted(depths.items())},
            "modes": modes,
        }

    def by_mode(self) -> dict[str, dict[str, int]]:
        """For JSON: `ModeRecord.totals` by the mode that drafted."""
        return {name: record.totals() for name, record in sorted(self.modes.items())}

    def _record(self, name: str) -> ModeRecord:
        if name not in self.modes:
            # Replaced, not changed: another thread may be iterating over it.
            self.modes = {**self.modes, name: ModeRecord()}
        return self.modes[name]


@dataclass
class ModeRecord:
    """Counts of one mode.

    Attributes:
        drafts: number of drafts by verified tokens (at least one) and accepted tokens.
        draft_bytes: bytes of experts that draft passes read.
    """

    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    draft_bytes: int = 0

    def totals(self) -> dict[str, int]:
        """Number of drafts, and of their tokens that were verified and accepted; for JSON."""
        drafts = dict(self.drafts)
        verified, accepted = (
            sum(draft[part] * count for draft, count in drafts.items()) for part in (0, 1)
        )
        return {"drafts": sum(drafts.values()), "verified": verified, "accepted": accepted}

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``acceptance`` of a position is among drafts accepted up to it."""
        drafts, totals = dict(self.drafts), self.totals()
        positions = []
        reached = sum(drafts.values())
        for position in range(max((deep for deep, _ in drafts), default=0)):
            read, taken = (
                sum(count for draft, count in drafts.items() if draft[part] > position)
                for part in (0, 1)
            )
            reached = min(reached, read)
            positions.append(
                {"verified": read, "accepted": taken, "acceptance": taken / max(reached, 1)}
            )
            reached = taken
        return {
            **totals,
            "acceptance": totals["accepted"] / max(totals["verified"], 1),
            "by_position": positions,
            "draft_bytes": self.draft_bytes,
        }
