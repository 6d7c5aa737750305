"""A simulated engine: steps whose costs and acceptance are known here, and learned by a controller.

A pass costs for itself, for each row, for each distinct expert and more for each that is not in
memory; how many there are follows a law of its own. Drafted tokens have a confidence, of which the
acceptance is a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, cast

import numpy as np

from moe.sequence import RunningSequence
from moe.speculate.controller import AutoController
from moe.speculate.draft import Choice, Controller, Draft, Mode, Round, Trial
from moe.speculate.speculator import PlainSteps

MAX_DEPTH = 6
NGRAM = Mode("ngram")


class FakeSequence:
    """Stands for a sequence."""


@dataclass(frozen=True)
class World:
    """Costs and chances, which a controller has to learn.

    Attributes:
        accepts: mean acceptance of each mode; of a model-free one when it has an offer.
        draft_pass, draft_row: seconds of an elastic draft pass, and of each row in it.
        spread: of acceptance from token to token; confidences follow it.
        unlike: spread of acceptance from sequence to sequence.
        offers: share of steps in which a model-free mode has an offer.
        step, row, near, far: seconds of a pass, a row, an expert in memory, a missing one.
        experts, visits, resident, hits: of all layers; of a token; share in memory; share of a
            token's experts that are.
        kin: exponent of the independence of sequences, and of neighbours in one.
        noise: standard deviation of the logarithm of times.
        looking: seconds of a lookup of drafts.
    """

    accepts: Mapping[Mode, float]
    draft_pass: float = 0.4
    draft_row: float = 0.02
    spread: float = 0.25
    unlike: float = 0.0
    offers: float = 0.0
    step: float = 0.2
    row: float = 0.02
    near: float = 0.7 / 384
    far: float = 0.0
    experts: int = 48 * 128
    visits: float = 48 * 8
    resident: float = 1.0
    hits: float = 1.0
    kin: tuple[float, float] = (0.85, 0.7)
    noise: float = 0.05
    looking: float = 0.0

    def visited(self, batch: int, rows: int) -> tuple[float, float]:
        """Distinct experts of a pass, and the missing ones."""
        worth = batch ** self.kin[0] * (rows / batch) ** self.kin[1]
        share = self.visits / self.experts
        away = 1 - self.resident
        distinct = self.experts * (1 - (1 - share) ** worth)
        if away == 0:
            return distinct, 0.0
        lost = (1 - self.hits) * share / away
        return distinct, self.experts * away * (1 - (1 - lost) ** worth)

    def verify(self, batch: int, rows: int) -> float:
        distinct, missing = self.visited(batch, rows)
        return self.step + self.row * rows + self.near * distinct + self.far * missing

    def draft(self, rows: int) -> float:
        return self.draft_pass + self.draft_row * rows


@dataclass
class Outcome:
    """Expected tokens and seconds of the decisions made. The controller sees random outcomes; its
    decisions are judged by their expectations, so luck counts little."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Simulation:
    """Runs a controller in a world."""

    world: World
    batch: int = 1
    seed: int = 0
    sequences: list[RunningSequence] = field(default_factory=list)
    plain: PlainSteps = field(default_factory=PlainSteps)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._quality: dict[int, float] = {}
        self._renew()

    def _renew(self) -> None:
        self.sequences = [cast(RunningSequence, FakeSequence()) for _ in range(self.batch)]
        unlike = self.world.unlike
        self._quality = {
            id(each): float(self.rng.uniform(-unlike, unlike)) for each in self.sequences
        }

    def controller(self) -> AutoController:
        """One that knows nothing of this world but its elastic modes."""
        modes = [mode for mode in self.world.accepts if mode.source == "elastic"]
        return AutoController(modes)

    def run(self, controller: Any, steps: int, renew: int = 200) -> Outcome:
        """Tokens and seconds of so many steps; sequences end and others come."""
        outcome = Outcome()
        for step in range(steps):
            if step % renew == renew - 1:
                self._renew()
            self._step(controller, outcome)
        return outcome

    def _step(self, controller: Any, outcome: Outcome) -> None:
        if self.plain.begin(controller, self.batch):
            self.plain.over(self._pass(outcome, self.batch), 0.0)
            return
        offers = [self._offers() for _ in self.sequences]
        choices = controller.plan(self.sequences, [MAX_DEPTH] * self.batch, offers)
        if choices is None:
            outcome.seconds += self.world.looking
            self.plain.over(self._pass(outcome, self.batch), self.world.looking)
            return
        chances: list[list[float]] = [[] for _ in choices]
        draft_rows = self._draft(controller, choices, chances)
        trials = []
        for sequence, choice, own, offered in zip(
            self.sequences, choices, chances, offers, strict=True
        ):
            if choice.mode is not None and choice.mode.source != "elastic":
                offer = next(each for each in offered if each.mode == choice.mode)
                own = list(offer.confidence[: choice.depth])
            trials.append(self._trial(controller, sequence, choice, own))
        rows = self.batch + sum(trial.drafted for trial in trials)
        drafting = sum(map(self.world.draft, draft_rows))
        outcome.seconds += drafting + self.world.looking
        drafting = drafting * self._noise() + self.world.looking
        verifying = self._pass(outcome, rows)
        controller.observe(Round(trials, rows, draft_rows, drafting, verifying, 0, True))
        for trial in trials:
            outcome.tokens += sum(accumulate(trial.confidence[: trial.drafted], mul))

    def _pass(self, outcome: Outcome, rows: int) -> float:
        """The model's own pass and the tokens that it adds; returns the time that is measured."""
        seconds = self.world.verify(self.batch, rows)
        outcome.tokens += self.batch
        outcome.seconds += seconds
        return seconds * self._noise()

    def _noise(self) -> float:
        noise = self.world.noise
        return float(np.exp(noise * self.rng.normal() - noise**2 / 2))

    def _offers(self) -> list[Draft]:
        if NGRAM not in self.world.accepts or self.rng.random() > self.world.offers:
            return []
        return [Draft.sure(NGRAM, [0] * MAX_DEPTH, [self._chance(NGRAM, 0.0)] * MAX_DEPTH)]

    def _draft(
        self, controller: Any, choices: Sequence[Choice], chances: list[list[float]]
    ) -> tuple[int, ...]:
        """Draft passes of all sequences that go on; fills in the chances of their tokens."""
        modes = {i: c.mode for i, c in enumerate(choices) if c.mode is not None and c.depth}
        modes = {index: mode for index, mode in modes.items() if mode.source == "elastic"}
        going = set(modes)
        rows = []
        while going:
            rows.append(len(going))
            for index in list(going):
                quality = self._quality[id(self.sequences[index])]
                chances[index].append(self._chance(modes[index], quality))
                done = len(chances[index]) == choices[index].depth
                if done or not controller.stop(modes[index]).goes_on(chances[index]):
                    going.remove(index)
        return tuple(rows)

    def _chance(self, mode: Mode, quality: float) -> float:
        mean = min(max(self.world.accepts[mode] + quality, 0.02), 0.98)
        spread = self.world.spread
        if not spread:
            return mean
        strength = 0.25 / spread**2
        return float(self.rng.beta(mean * strength, (1 - mean) * strength))

    def _trial(
        self, controller: Any, sequence: RunningSequence, choice: Choice, own: list[float]
    ) -> Trial:
        elastic = choice.mode is not None and choice.mode.source == "elastic"
        kept = controller.keep(choice.mode, own) if own and elastic else len(own)
        accepted = self._right(own[:kept])
        return Trial(sequence, choice.mode if kept else None, kept, accepted, tuple(own))

    def _right(self, chances: Sequence[float]) -> int:
        """Tokens that luck accepts."""
        right = 0
        while right < len(chances) and self.rng.random() < chances[right]:
            right += 1
        return right


class Always(Controller):
    """A fixed depth without any judgement."""

    def __init__(self, mode: Mode, depth: int) -> None:
        self.mode, self.depth = mode, depth

    def plan(self, sequences: Sequence[RunningSequence], *_: Any) -> list[Choice]:
        choice = Choice(self.mode, self.depth) if self.depth else Choice()
        return [choice] * len(sequences)


def best_fixed(world: World, batch: int) -> tuple[float, float]:
    """Tokens a second of plain decoding and of the best mode and depth, by what is to be expected
    where sequences are alike."""
    assert world.unlike == 0
    plain = best = batch / world.verify(batch, batch)
    for mode, chance in world.accepts.items():
        tokens = float(batch)
        for depth in range(1, MAX_DEPTH + 1):
            tokens += batch * chance**depth
            seconds = depth * world.draft(batch) + world.verify(batch, batch * (1 + depth))
            best = max(best, tokens / seconds)
        assert mode.source == "elastic"
    return plain, best
