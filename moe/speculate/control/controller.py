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
from moe.speculate.control.search import PLAIN, Plan, Search, Step
from moe.speculate.control.steps import StepCosts
from moe.speculate.control.upkeep import Upkeep
from moe.speculate.draft import Choice, Draft, Judged, Mode, Round

LEARNING = 0.01
"""Share of the time that learning may take; then only some steps are learnt from."""


class Controller:
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
        self._seen: tuple[int, Counts | None] = 0, None  # rows and experts of this step
        self._passes = 0.0  # seconds of its passes

    def rests(self, batch: int) -> int:
        """Plain steps to come that need not be asked about."""
        poor = self.account.recovers(self.costs.verify(batch, batch))
        if not poor and self._paper.pays(self._free):
            self._rest.wake()
        idle = self._planner.budget.steps_until_trial(batch) if self._idle else 0
        steps = self._rest.steps(batch) or self._rest.piece(poor or idle)
        if steps == 0 or self.costs.coverage.sizes.resident < 1:  # what rests visit says little
            self._count.start()
        return steps

    def rested(self, batch: int, seconds: Sequence[float]) -> None:
        """Learn from plain steps."""
        self._rest.over(batch, len(seconds))
        if known := [each for each in seconds if not isnan(each)]:
            steps, mean = len(known), typical(known)
            counts = self._count.read() if steps == len(seconds) else None
            self.costs.rested(batch, mean, counts, steps)
            self.account.earn(steps * mean, mean)

    def hear(self, sequence: RunningSequence, mode: Mode, judged: Sequence[Judged]) -> None:
        """What a model-free mode would have drafted while nobody looked, and what was right."""
        batch, saved = self._rest.batch, 0.0
        step = self.costs.verify(batch, batch)
        price = self._planner.prices[1] or self.costs.row(batch, batch) * batch / step
        for confidence, right in judged:
            if drafted := len(confidence):
                self.acceptance.observe(sequence, mode, drafted, confidence, drafted, right)
            depth = self.keep(mode, confidence)
            gain = min(right, depth) - depth * price - (self.costs.overhead / step if depth else 0)
            self._paper.note(mode, gain)
            saved += gain * step  # one sequence stands for all
        self.account.promise(saved, step)

    def needs_offers(self, batch: int) -> bool:
        """Whether a step in which nothing is offered is plain: no search is due, no pass wanted."""
        best = self._planner.best
        return best is not None and best.mode is None and self._planner.stands(batch, self._idle)

    def passed(self, batch: int, seconds: float) -> None:
        """A step that was offered nothing took so long."""
        self.acceptance.step += 1
        self._wait, self._seen = self._wait - 1, (batch, self._count.read())
        self.costs.follow(batch, *self._seen)
        if self._wait < 0:  # as often as drafts are learnt from
            for mode in self._free * batch:
                self._paper.note(mode, 0.0)
        step, plain = self.costs.verify(batch, batch), self.costs.plainly(batch, *self._seen)
        seconds = min(seconds, OUTLIER * step)
        self.account.settle(seconds, plain, step)
        self._looked(seconds - plain, step)

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
        self._wait, self._seen = self._wait - 1, (round.rows, self._count.read())
        self._passes = round.verify_seconds + (round.draft_seconds if round.draft_rows else 0.0)
        if round.alone:
            self.costs.follow(len(round.trials), *self._seen)
        if self._wait >= 0 and self._plan is not None and not self._plan.trial:
            return
        start = self._clock()
        self._learn(round)
        self._learning.took(self._clock() - start)
        self._wait = self._learning.steps(round.draft_seconds + round.verify_seconds)

    def took(self, batch: int, tokens: int, seconds: float) -> None:
        """A whole step took so long, this controller included."""
        assert self._plan is not None
        assert self._planner.best is not None
        step, plain = self.costs.verify(batch, batch), self.costs.plainly(batch, *self._seen)
        if seconds > OUTLIER * step:
            seconds = min(seconds, OUTLIER * self._planner.search.seconds(self._plan))
        self.account.settle(seconds, tokens * plain / batch, step)
        drafted = any(choice.depth for choice in self._plan.choices)
        if drafted:
            self.costs.besides(min(max(seconds - self._passes, 0.0), step))
        if self._plan.trial:
            self.account.tried(seconds - tokens / self._planner.best.option.goodput)
        elif self._idle or not drafted:
            self._looked(seconds - plain, step)

    def _looked(self, seconds: float, step: float) -> None:
        """Looking for drafts took so long, and found none."""
        if self._idle:
            self._paper.looked(0.0)
            self._rest.looked(max(seconds, 0.0), step)
        else:
            self._paper.looked(max(seconds, 0.0) / step)

    def figures(self) -> dict[str, Any]:
        """What is known and what came of it, for JSON."""
        return control_figures(self._planner.best, self.costs, self.account, self.acceptance)

    @property
    def _idle(self) -> bool:
        """Whether no drafts are in sight that would pay."""
        best = self._planner.best
        return (best is None or best.way == PLAIN) and not self._paper.pays(self._free)

    def _learn(self, round: Round) -> None:
        plan = self._plan
        if plan is None or len(round.trials) != len(plan.choices):
            return
        overhead = self.costs.overhead / self.costs.verify(len(round.trials), len(round.trials))
        for trial, choice in zip(round.trials, plan.choices, strict=True):
            if choice.mode is not None:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
            for mode in self._free:
                gain = trial.accepted - trial.drafted * self._planner.prices[1]
                self._paper.note(mode, gain - overhead if mode == trial.mode else 0.0)
        if round.alone:
            self.costs.observe(plan.mode, round, self._seen[1])
