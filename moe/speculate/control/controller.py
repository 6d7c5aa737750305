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
from moe.speculate.control.budget import Budget
from moe.speculate.control.coverage import Counter, Counts
from moe.speculate.control.figures import control_figures
from moe.speculate.control.paper import Paper
from moe.speculate.control.rest import OUTLIER, Rest, typical
from moe.speculate.control.search import PLAIN, Plan, Search, Step, prices
from moe.speculate.control.steps import StepCosts
from moe.speculate.control.upkeep import Upkeep
from moe.speculate.draft import Choice, Draft, Judged, Mode, Round

CAUTION = 1.02
"""How much better than plain decoding drafting must look."""
PLANNING = 0.005
"""Share of the time that searching for the best plan may take; between searches plans stand."""
LOOKING = 0.0025
"""The same of looking for drafts where none have paid."""
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
        self._search = Search(elastic, self.acceptance, costs)
        self._budget = Budget(self._search, self.account)
        self._count, self._clock = count, clock
        self._plan: Plan | None = None  # of this step
        self._best: Plan | None = None  # that was known at the last search
        self._searched, self._every, self._wait = 0, 1, 0
        self._searching, self._looking, self._learning = map(Upkeep, (PLANNING, LOOKING, LEARNING))
        self._seen: tuple[int, Counts | None] = 0, None  # rows and experts of this step
        self._prices = 0.0, 0.0  # tokens that a pass more, and a row more, have to bring

    def rests(self, batch: int) -> int:
        """Plain steps to come that need not be asked about."""
        poor = self.account.recovers(self.costs.verify(batch, batch))
        if not poor and self._paper.pays(self._free):
            self._rest.wake()
        idle = self._budget.steps_until_trial(batch) if self._idle else 0
        steps = self._rest.steps(batch) or self._rest.piece(poor or idle)
        if steps == 0 or self.costs.coverage.sizes.resident < 1:  # what rests visit says little
            self._count.start()
        return steps

    def rested(self, batch: int, seconds: Sequence[float]) -> None:
        """Learn from plain steps that nobody has been told of one by one."""
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
        price = self._prices[1] or self.costs.row(batch, batch) * batch / step
        for confidence, right in judged:
            if drafted := len(confidence):
                self.acceptance.observe(sequence, mode, drafted, confidence, drafted, right)
            depth = self.keep(mode, confidence)
            self._paper.note(mode, gain := min(right, depth) - depth * price)
            saved += gain * step  # one sequence stands for all
        self.account.promise(saved, step)

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice]:
        """One choice for each running sequence."""
        self.acceptance.step += 1
        step = Step(sequences, limits, offers)
        if self._best is not None and self._stands(self._best, len(sequences)):
            plan = self._search.again(step, self._best, self._prices[1])
        else:
            plan = self._search_plan(step)
        self._plan = self._budget.within(step, plan)
        return self._plan.choices

    def goes_on(self, mode: Mode, confidence: Sequence[float]) -> bool:
        """Whether another token after these is likely enough to pay for drafting and reading it."""
        a_pass, a_row = self._prices
        survival = self.acceptance.drafted(None, mode, confidence)[-1]
        return self.acceptance.worth(mode, survival, a_row) >= a_pass

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """How many tokens of a draft are likely enough to pay for reading them."""
        survival = self.acceptance.drafted(None, mode, confidence)
        return sum(each >= self._prices[1] for each in survival)

    def observe(self, round: Round) -> None:
        """A step is over: learn from it, if learning has not taken too much time already."""
        self._wait, self._seen = self._wait - 1, (round.rows, self._count.read())
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
        assert self._best is not None
        step, plain = self.costs.verify(batch, batch), self.costs.plainly(batch, *self._seen)
        if seconds > OUTLIER * step:
            seconds = min(seconds, OUTLIER * self._search.seconds(self._plan))
        self.account.settle(seconds, tokens * plain / batch, step)
        if self._plan.trial:
            self.account.tried(seconds - tokens / self._best.option.goodput)
        elif self._idle:
            self._paper.looked(0.0)
            self._looking.took(max(seconds - plain, 0.0))
            self._rest.take(self._looking.steps(step))
        elif not any(choice.depth for choice in self._plan.choices):
            self._paper.looked(max(seconds - plain, 0.0) / step)

    def figures(self) -> dict[str, Any]:
        """What is known and what came of it, for JSON."""
        return control_figures(self._best, self.costs, self.account, self.acceptance)

    @property
    def _idle(self) -> bool:
        """Whether no drafts are in sight that would pay."""
        drafting = self._best is not None and self._best.way != PLAIN
        return not drafting and not self._paper.pays(self._free)

    def _stands(self, best: Plan, batch: int) -> bool:
        """Whether no search for a plan is due."""
        if batch != len(best.choices) or self.acceptance.step >= self._searched + self._every:
            return False
        return not (self._idle and self._budget.may_try(batch))

    def _learn(self, round: Round) -> None:
        if (plan := self._plan) is None or len(round.trials) != len(plan.choices):
            return
        for trial, choice in zip(round.trials, plan.choices, strict=True):
            if choice.mode is not None:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
            for mode in self._free:
                gain = trial.accepted - trial.drafted * self._prices[1]
                self._paper.note(mode, gain if mode == trial.mode else 0.0)
        if round.alone:
            self.costs.observe(plan.mode, round, self._seen[1])

    def _search_plan(self, step: Step) -> Plan:
        start, before = self._clock(), PLAIN if self._best is None else self._best.way
        best = self._search.best(step, before, CAUTION)
        plan = self._budget.trial(step, best) or best
        self._best, self._prices = best, prices(plan, best.option.goodput, self.costs)
        self._searched = self.acceptance.step
        self._searching.took(self._clock() - start)
        self._every = 1 + self._searching.steps(best.option.seconds)
        return plan
