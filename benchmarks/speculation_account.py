"""What the controller's decisions are worth, by an account: no clock of this machine's in it.

The real `Speculator`, with its controller and its model-free drafts, goes through texts that the
shipped model has said. A drafted token is right where the text has it; drafts by the model itself
are right as often as the shipped model's were. Time is what such steps have been measured to take,
with noise that is drawn (`Costs`): so whatever else runs here, the same texts give the same
figures, and what a decision costs can be counted apart from what an operation costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

from moe.sampling.batch import Token
from moe.sampling.sampler import Verified
from moe.speculate.controller import AutoController
from moe.speculate.draft import Draft, FixedDepth, Mode, Stop
from moe.speculate.ngram import ModelFree, NGram, NGramState
from moe.speculate.passes import PassDrafts
from moe.speculate.speculator import Speculator

MAX_DEPTH = 6
MODES = (Mode("elastic", bits=4), Mode("elastic", bits=2), Mode("elastic", bits=4, experts=2))
Said = tuple[list[int], list[int]]
"""A prompt, and what the model has said behind it."""
EXPERTS, VISITS = 384, 24
"""Of the shipped model, in all layers; of a token."""


@dataclass(frozen=True)
class Costs:
    """What is measured of the shipped model (docs/results), in plain steps of one sequence.

    Attributes:
        second: of any rows beyond one: passes of one row take a way of their own.
        sequence, row: of one more sequence in a step, of one more drafted row.
        a_pass: of drafting by the model.
        looking: for drafts, of one sequence; half of it, if in vain, in the pass behind, whose
            caches it has emptied.
        drafting: beside that, of proposing, verifying and telling where some are drafted.
        thinking: of the controller in a step that it plans.
        accepts: share of tokens drafted by the model itself that are right, at temperature 0, else.
        noise: standard deviation of the logarithm of times.
        peaks: share of steps that look or draft in which other work comes between: they take three
            times as long.
        first: the first step that verifies takes so many times what it will take later.
    """

    second: float
    sequence: float
    row: float
    a_pass: float
    looking: float
    drafting: float
    thinking: float
    accepts: tuple[float, float]
    noise: float = 0.1
    peaks: float = 0.01
    first: float = 3.0

    def step(self, sequences: int, rows: int) -> float:
        more = self.sequence * (sequences - 1) + self.row * (rows - sequences)
        return 1 + self.second * (rows > 1) + more


COSTS = {
    1.0: Costs(0.35, 0.38, 0.115, 1.1, 0.1, 0.2, 0.05, (0.98, 0.92)),
    0.5: Costs(0.0, 0.7, 0.13, 0.45, 0.01, 0.03, 0.01, (0.66, 0.53), noise=0.4),
    0.25: Costs(0.0, 0.55, 0.1, 0.35, 0.01, 0.02, 0.01, (0.44, 0.33), noise=0.25),
}
"""By the share of experts in memory."""


class Spoken:
    """A sequence that says what was said."""

    def __init__(self, text: Said) -> None:
        self.prompt_token_ids, self.said = text
        self.token_ids = self.said[:1]
        self.max_new_tokens = len(self.said)

    def verify(self, draft: Draft, logits_TV: Tensor) -> Verified:
        """Return what a sampler that draws what was said makes of a draft."""
        tokens, following = list[Token](), self.said[len(self.token_ids) :]
        for token, guess in zip(following, (*draft.tokens, None), strict=False):
            tokens.append(Token(token))
            if token != guess:
                break
        return Verified(tokens, None, logits_TV, [])


class Asked(NGram):
    """N-grams that take their time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def take(self, state: NGramState, tokens: Sequence[int]) -> None:
        self._world.now += self._world.costs.looking / 2
        super().take(state, tokens)


class Drawn:
    """Drafts by the model itself, right by luck."""

    def __init__(self, world: World) -> None:
        self.bytes_read = 0
        self.rows: list[int] = []
        self._world = world

    def forecast(self) -> None:
        return None

    def draft(
        self, mode: Mode, sequences: Sequence[Any], depths: Sequence[int], stop: Stop
    ) -> list[Draft]:
        """One draft for each; confidence follows the chances."""
        world, made, longest = self._world, [], 0
        for sequence, depth in zip(sequences, depths, strict=True):
            ahead, confidence = sequence.said[len(sequence.token_ids) :], list[float]()
            while len(confidence) < depth and (not confidence or stop.goes_on(confidence)):
                confidence.append(world.chance(mode))
            tokens = [
                token if world.rng.random() < chance else -1
                for token, chance in zip(ahead, confidence, strict=False)
            ]
            made.append(Draft.sure(mode, tokens, confidence[: len(tokens)]))
            longest = max(longest, len(confidence))
        self.rows = [len(sequences)] * longest
        share = 0.5 if mode.experts else 0.8 if mode.bits == 2 else 1.0
        whole = world.costs.step(len(sequences), len(sequences))
        world.pass_by(longest * world.costs.a_pass * whole * (0.5 + 0.5 * share))
        return made


@dataclass
class World:
    """A machine on which time is what `Costs` say.

    Attributes:
        now: in plain steps.
        verified: steps that verified drafts.
        thinking: what the controller takes in such steps.
    """

    costs: Costs
    temperature: float
    seed: int = 0
    now: float = 0.0
    verified: int = 0
    thinking: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def step(self, sequences: int, drafted: int, looks: bool = False, drafts: bool = False) -> None:
        """The model's own pass, with the additional time of steps that look drafts up or draft."""
        costs = self.costs
        seconds = costs.step(sequences, sequences + drafted)
        if drafted:
            self.verified += 1
            seconds *= costs.first if self.verified == 1 else 1.0
        if looks or drafts:
            seconds *= 3 if self.rng.random() < costs.peaks else 1
            seconds += self.thinking
            seconds += costs.drafting * sequences**0.5 if drafts else costs.looking / 2 * sequences
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        noise = self.costs.noise
        self.now += seconds * float(np.exp(noise * self.rng.normal() - noise**2 / 2))

    def chance(self, mode: Mode) -> float:
        mean = self.costs.accepts[self.temperature > 0] * (0.93 if mode.bits == 2 else 1.0)
        mean *= 0.95 if mode.experts else 1.0
        return float(self.rng.beta(4 * mean, 4 * (1 - mean)))

    def auto(self) -> Speculator:
        self.thinking = self.costs.thinking
        return self._speculator(AutoController(MODES), Asked(self))

    def fixed(self, mode: Mode, depth: int) -> Speculator:
        free = [source for source in (Asked(self),) if source.mode == mode]
        return self._speculator(FixedDepth(mode, depth), *free)

    def _speculator(self, controller: Any, *free: ModelFree[Any]) -> Speculator:
        drafts = cast(PassDrafts, Drawn(self))
        return Speculator(controller, {"elastic": drafts}, free, MAX_DEPTH, lambda: self.now)
