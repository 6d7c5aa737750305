"""How far to draft, and how: what brings the most tokens a second, as far as is known so far.

What model-free drafts offer is taken where it pays beside plain decoding; of drafts by the model
itself the best that is known, and now and then another one that luck could make better. Nothing is
drafted that could lose more than an account has room for. No tensors here: it runs in simulated
worlds, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from moe.sequence import RunningSequence
from moe.speculate.control.acceptance import Acceptance
from moe.speculate.control.account import Account
from moe.speculate.control.coverage import Counter, Counts
from moe.speculate.control.figures import control_figures
from moe.speculate.control.looking import OUTLIER, Looking, typical
from moe.speculate.control.offered import Offered
from moe.speculate.control.planner import Planner
from moe.speculate.control.search import Plan, Search, Step
from moe.speculate.control.steps import StepCosts
from moe.speculate.control.upkeep import Upkeep
from moe.speculate.draft import Choice, Controller, Draft, Mode, Plain, Round

LEARNING = 0.005
"""Share of the time that learning may take; then only some steps are learnt from."""


class AutoController(Controller):
    """Chooses how each step drafts. See `moe.speculate.draft.Controller`.

    Args:
        modes: that draft with passes of the model.
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
        self.account, self._looking = Account(), Looking()
        self._planner = Planner(Search(modes, self.acceptance, costs), self.account, clock)
        self._offered = Offered(costs, self.account)
        self._count, self._clock = count, clock
        self._plan: Plan | None = None  # of this step, where passes of the model draft
        self._counted = True  # all plain steps since these were told of, and no others
        self._wait = 0
        self._learning = Upkeep(LEARNING)
        count.start()

    def rests(self, batch: int) -> int:
        """Plain steps to come that need not be asked about."""
        return self._looking.rests(batch)

    def rested(self, plain: Plain) -> None:
        """Learn from plain steps."""
        self.acceptance.step += len(plain.seconds) - plain.looks
        if known := [each for each in plain.seconds if not isnan(each)]:
            steps, step = len(known), typical(known)
            whole = self._counted and steps == len(plain.seconds)
            self.costs.rested(plain.batch, step, self._count.read() if whole else None, steps)
            self.account.earn(steps * step, step)
            self.account.settle(plain.looking, 0.0, step)
            self._looking.plainly(step, plain.looks, plain.looking)
        self._count.start()
        self._counted = True

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice] | None:
        """One choice for each running sequence."""
        self.acceptance.step += 1
        self._plan = None
        if self.acceptance.step >= self._planner.wakes:
            self._plan = self._planner.plan(Step(sequences, limits, offers))
        choices = self._offered.choose(offers) if self._plan is None else self._plan.choices
        if choices is None:
            self._looking.missed()
        else:
            self._count.start()
            self._counted = False
        return choices

    def goes_on(self, mode: Mode, confidence: Sequence[float]) -> bool:
        """Whether another token after these is likely enough to pay for drafting and reading it."""
        a_pass, a_row = self._planner.prices
        survival = self.acceptance.drafted(mode, confidence)[-1]
        return self.acceptance.worth(mode, survival, a_row) >= a_pass

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """Tokens of a draft that are likely enough to pay for reading them."""
        survival = self.acceptance.drafted(mode, confidence)
        return sum(each >= self._planner.prices[1] for each in survival)

    def observe(self, round: Round) -> None:
        """A step is over: learn from it, if learning has not taken too much time already."""
        plan, batch = self._plan, len(round.trials)
        counts, seconds = self._count.read(), round.draft_seconds + round.verify_seconds
        self._wait -= 1
        if plan is not None and batch != len(plan.choices):
            return
        if round.alone:
            self.costs.follow(batch, round.rows, counts)
        if self._wait < 0 or (plan is not None and plan.trial):
            start = self._clock()
            self._learn(plan, round, counts)
            learning = self._clock() - start
            self._learning.took(learning)
            self._wait = self._learning.steps(seconds)
            seconds += learning
        if round.alone:
            self._settle(plan, round, counts, seconds)

    def _settle(self, plan: Plan | None, round: Round, counts: Counts | None, took: float) -> None:
        """A whole step took so many seconds, this controller included."""
        batch, costs = len(round.trials), self.costs
        step, plain = costs.verify(batch, batch), costs.plainly(batch, round.rows, counts)
        seconds = took
        if took > OUTLIER * step:
            planned = None if plan is None else self._planner.search.seconds(plan)
            seconds = min(took, OUTLIER * (planned or costs.verify(batch, round.rows)))
        tokens = batch + sum(trial.accepted for trial in round.trials)
        instead = tokens * plain / batch
        self.account.settle(seconds, instead, step)
        passes = round.verify_seconds + (round.draft_seconds if round.draft_rows else 0.0)
        costs.besides(min(max(seconds - passes, 0.0), step))
        if plan is not None and plan.trial:
            assert self._planner.best is not None
            self.account.tried(seconds - tokens / self._planner.best.option.goodput)
        else:
            self._looking.found((instead - seconds) / step)

    def figures(self) -> dict[str, Any]:
        """What is known and what came of it, for JSON."""
        return control_figures(self._planner.best, self.costs, self.account, self.acceptance)

    def _learn(self, plan: Plan | None, round: Round, counts: Counts | None) -> None:
        for trial, choice in zip(round.trials, plan.choices if plan else (), strict=False):
            if choice.mode in self.acceptance.positions:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
        if round.alone:
            self.costs.observe(None if plan is None else plan.mode, round, counts)
