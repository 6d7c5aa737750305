"""How far to draft, and how: what brings the most tokens a second, as far as is known so far.

Each step the choice with the highest goodput is taken; now and then another one that luck could
make better. Nothing is drafted that could lose more than an account has room for, and where no
drafts are in sight nobody looks for them. Everything is learnt from steps, and from what drafts
that cost nothing would have brought. No tensors here: it runs in simulated worlds, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from moe.engine.sequence import RunningSequence
from moe.speculate.control.acceptance import Acceptance
from moe.speculate.control.account import Account
from moe.speculate.control.coverage import Counter, Counts
from moe.speculate.control.figures import control_figures
from moe.speculate.control.paper import Paper
from moe.speculate.control.planner import Planner
from moe.speculate.control.rest import OUTLIER, Rest, typical
from moe.speculate.control.search import Plan, Search, Step
from moe.speculate.control.steps import StepCosts
from moe.speculate.control.upkeep import Upkeep
from moe.speculate.draft import Choice, Controller, Draft, Heard, Judged, Mode, Round

LEARNING = 0.005
"""Share of the time that learning may take; then only some steps are learnt from."""


class AutoController(Controller):
    """Chooses how each step drafts. See `moe.speculate.draft.Controller`.

    Args:
        modes: ways to draft.
        max_depth: most tokens of a draft.
        costs: what steps take.
        count: counts experts.
        clock: measures how long planning takes.
    """

    def __init__(
        self,
        modes: Sequence[Mode],
        max_depth: int,
        costs: StepCosts,
        count: Counter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs
        self.acceptance = Acceptance(modes, max_depth)
        self.account, self._paper, self._rest = Account(), Paper(), Rest()
        elastic = [mode for mode in modes if mode.source == "elastic"]
        self._free = [mode for mode in modes if mode.source != "elastic"]
        self._planner = Planner(Search(elastic, self.acceptance, costs), self.account, clock)
        self._count, self._clock = count, clock
        self._plan: Plan | None = None  # of this step
        self._wait = 0
        self._learning = Upkeep(LEARNING)

    def rests(self, batch: int) -> int:
        """Plain steps to come that need not be asked about."""
        poor = self.account.recovers(self.costs.verify(batch, batch))
        if not poor and self._paper.pays():
            self._rest.wake()
        idle = self._planner.budget.steps_until_trial(batch) if self._idle else 0
        steps = self._rest.steps(batch)
        if steps == 0 or self._free:  # which are heard between pieces
            steps = self._rest.piece(steps or poor or idle)
        if steps == 0 or self.costs.coverage.sizes.resident < 1:  # what rests visit says little
            self._count.start()
        return steps

    def rested(self, batch: int, seconds: Sequence[float], heard: Sequence[Heard]) -> None:
        """Learn from plain steps."""
        self._rest.over(batch, len(seconds))
        if known := [each for each in seconds if not isnan(each)]:
            steps, mean = len(known), typical(known)
            counts = self._count.read() if steps == len(seconds) else None
            self.costs.rested(batch, mean, counts, steps)
            self.account.earn(steps * mean, mean)
        for each in heard:
            self._hear(batch, *each)

    def _hear(
        self, batch: int, sequence: RunningSequence, mode: Mode, judged: Sequence[Judged]
    ) -> None:
        step, saved = self.costs.verify(batch, batch), 0.0
        for confidence, right in judged:
            if drafted := len(confidence):
                self.acceptance.observe(sequence, mode, drafted, confidence, drafted, right)
            depth = self.keep(mode, confidence)
            gain = min(right, depth) - self._price(batch, depth)
            if mode == self._free[0]:  # what others bring is known where somebody looks
                self._paper.note(gain)
            saved += gain * step  # one sequence stands for all
        if self._paper.pays():
            self.account.promise(saved, step)

    def _price(self, batch: int, depth: int) -> float:
        """Tokens of a sequence that plain decoding brings while so many drafted ones are read of
        it, and of half of the others."""
        if depth == 0:
            return 0.0
        step, half = self.costs.verify(batch, batch), (batch + 1) // 2
        more = self.costs.verify(batch, batch + half * depth) - step + self.costs.overhead
        return more * batch / (half * step)

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice]:
        """One choice for each running sequence."""
        self.acceptance.step += 1
        self._plan = self._planner.plan(Step(sequences, limits, offers), self._idle)
        return self._plan.choices

    def goes_on(self, mode: Mode, confidence: Sequence[float]) -> bool:
        """Whether another token after these is likely enough to pay for drafting and reading it."""
        a_pass, a_row = self._planner.prices
        survival = self.acceptance.drafted(None, mode, confidence)[-1]
        return self.acceptance.worth(mode, survival, a_row) >= a_pass

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """Tokens of a draft that are likely enough to pay for reading them."""
        survival = self.acceptance.drafted(None, mode, confidence)
        return sum(each >= self._planner.prices[1] for each in survival)

    def observe(self, round: Round) -> None:
        """A step is over: learn from it, if learning has not taken too much time already."""
        assert self._plan is not None
        counts, seconds = self._count.read(), round.draft_seconds + round.verify_seconds
        self._wait -= 1
        if len(round.trials) != len(self._plan.choices):
            return
        if round.alone:
            self.costs.follow(len(round.trials), round.rows, counts)
        if self._wait < 0 or self._plan.trial:
            start = self._clock()
            self._learn(self._plan, round, counts)
            learning = self._clock() - start
            self._learning.took(learning)
            self._wait = self._learning.steps(seconds)
            seconds += learning
        if round.alone:
            self._settle(self._plan, round, counts, seconds)

    def _settle(self, plan: Plan, round: Round, counts: Counts | None, seconds: float) -> None:
        """A whole step took so long, this controller included."""
        assert self._planner.best is not None
        batch, tokens = len(round.trials), sum(1 + trial.accepted for trial in round.trials)
        step, plain = self.costs.verify(batch, batch), self.costs.plainly(batch, round.rows, counts)
        if seconds > OUTLIER * step:
            seconds = min(seconds, OUTLIER * self._planner.search.seconds(plan))
        instead, idle = tokens * plain / batch, self._idle
        self.account.settle(seconds, instead, step)
        if any(choice.depth for choice in plan.choices):
            passes = round.verify_seconds + (round.draft_seconds if round.draft_rows else 0.0)
            self.costs.besides(min(max(seconds - passes, 0.0), step))
        if plan.trial:
            self.account.tried(seconds - tokens / self._planner.best.option.goodput)
        elif idle:
            self._rest.looked(max(seconds - plain, 0.0), step)
        elif plan.mode is None:
            self._paper.note((instead - seconds) / step)

    def figures(self) -> dict[str, Any]:
        """What is known and what came of it, for JSON."""
        return control_figures(self._planner.best, self.costs, self.account, self.acceptance)

    @property
    def _idle(self) -> bool:
        """Whether no drafts are in sight that would pay."""
        best = self._planner.best
        return (best is None or best.mode is None) and not self._paper.pays()

    def _learn(self, plan: Plan, round: Round, counts: Counts | None) -> None:
        for trial, choice in zip(round.trials, plan.choices, strict=True):
            if choice.mode is not None:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
        if round.alone:
            self.costs.observe(plan.mode, round, counts)
