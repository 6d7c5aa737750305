"""How far to draft, and how: what brings the most tokens a second, as far as is known so far.

Each step the choice with the highest goodput is taken; now and then another one that would be
better if luck had it, as long as what such trials lose stays below a share of the time. Depth 0 is
plain decoding. Everything is learnt from the steps themselves. No tensors here: what decides can be
tried on simulated processes (tests/moe/speculate).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moe.sequence import RunningSequence
from moe.speculate.control.acceptance import Acceptance
from moe.speculate.control.coverage import Counter
from moe.speculate.control.figures import control_figures
from moe.speculate.control.goodput import Ledger
from moe.speculate.control.rest import Rest
from moe.speculate.control.search import (
    LOYALTY,
    PLAIN,
    Plan,
    Search,
    Step,
    Way,
    plain,
    prices,
)
from moe.speculate.control.steps import StepCosts
from moe.speculate.draft import Choice, Draft, Mode, Round

EXPLORE = 0.01
"""Share of the time that trials may lose."""
OPTIMISM = 2.0
"""Standard deviations by which a trial is hoped to do better than is known."""
STALE = 64
"""Steps after which plain decoding is measured again."""
WARM = 2
"""Plain steps of a batch before anything else is tried with it."""
PLANNING = 0.004
"""Share of the time that searching for the best plan may take; between searches plans stand."""
LONGEST = 64
"""Steps for which a plan may stand."""
LEARNING = 0.01
"""Share of the time that learning may take; then only some steps are learnt from."""
MOST_SKIPPED = 8
OUTLIER = 3.0
"""Times what was expected that a step may count for."""


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
        self.ledger = Ledger(EXPLORE)
        elastic = [mode for mode in modes if mode.source == "elastic"]
        self._search = Search(elastic, self.acceptance, costs)
        self._count, self._clock = count, clock
        self._plain: dict[int, tuple[int, int]] = {}  # of a batch: plain steps, the last of them
        self._sequences: Sequence[RunningSequence] = ()
        self._plan: Plan | None = None  # of this step
        self._best: Plan | None = None  # that was known at the last search
        self._searched, self._every = 0, 1
        self._search_seconds = 0.0
        self._rest = Rest()
        self._wait, self._learn_seconds = 0, 0.0
        self._prices = 0.0, 0.0  # tokens that a pass more, and a row more, have to bring

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice]:
        """One choice for each running sequence."""
        self.acceptance.step += 1
        self._count.start()
        step = Step(sequences, limits, offers)
        stands = self.acceptance.step < self._searched + self._every
        if self._best is not None and stands and list(sequences) == self._sequences:
            self._plan = self._search.again(step, self._best, self._prices[1])
        else:
            self._plan = self._search_plan(step)
        return self._plan.choices

    def rests(self, batch: int) -> bool:
        """Whether this step need not be asked about, nor told; then it is a plain one."""
        return self._rest.begins(batch)

    def took(self, batch: int, tokens: int, seconds: float, rested: bool) -> None:
        """A whole step took so long, this controller included."""
        self._rest.ends(batch, tokens, seconds, rested)

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
        self._wait -= 1
        if self._wait >= 0 and self._plan is not None and not self._plan.trial:
            return
        start = self._clock()
        self._learn(round)
        seconds = round.draft_seconds + round.verify_seconds
        self._learn_seconds += 0.2 * (self._clock() - start - self._learn_seconds)
        self._wait = min(int(self._learn_seconds / (LEARNING * seconds)), MOST_SKIPPED)

    def _learn(self, round: Round) -> None:
        plan, best, counts = self._plan, self._best, self._count.read()
        if plan is None or best is None or len(round.trials) != len(plan.choices):
            return
        for trial, choice in zip(round.trials, plan.choices, strict=True):
            if choice.mode is not None:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
        if not round.alone:
            return
        self.costs.observe(plan.mode, round, counts)
        batch, seconds = len(round.trials), round.draft_seconds + round.verify_seconds
        tokens = batch + sum(trial.accepted for trial in round.trials)
        self._every = min(int(self._search_seconds / (PLANNING * seconds)) + 1, LONGEST)
        if round.rows == batch:
            done, _ = self._plain.get(batch, (0, 0))
            self._plain[batch] = done + 1, self.acceptance.step
            self.ledger.note(seconds, seconds)
        else:
            plain_seconds = tokens * self.costs.verify(batch, batch) / batch
            self.ledger.note(min(seconds, OUTLIER * plan.option.seconds), plain_seconds)
        if plan.trial:
            self.ledger.tried(seconds - tokens / best.option.goodput)

    def figures(self) -> dict[str, Any]:
        """What is known and what came of it, for JSON."""
        return control_figures(self._best, self.costs, self.ledger, self.acceptance)

    def _search_plan(self, step: Step) -> Plan:
        start, before = self._clock(), self._best
        way: Way = (None, 0) if before is None else before.way
        best = self._search.best(step, way, self.ledger.caution)
        trial = self._trial(step, best)
        plan = best if trial is None else replace(trial, trial=True)
        self._best, self._prices = best, prices(plan, best.option.goodput, self.costs)
        self._sequences, self._searched = list(step.sequences), self.acceptance.step
        self._search_seconds += 0.2 * (self._clock() - start - self._search_seconds)
        return plan

    def _trial(self, step: Step, best: Plan) -> Plan | None:
        """Something else than the best that is known, where it is time for it and affordable."""
        batch = len(step.sequences)
        done, last = self._plain.get(batch, (0, 0))
        if done < WARM:
            return plain(step, self.costs)
        if not self.ledger.affords(0.0):
            return None
        if best.way != PLAIN and self.acceptance.step - last > STALE:
            tries = [plain(step, self.costs)]
        else:
            short = replace(step, limits=[min(limit, 1) for limit in step.limits])
            hopes = (self._search.best(each, PLAIN, optimism=OPTIMISM) for each in (step, short))
            least = LOYALTY * best.option.goodput
            tries = [hope for hope in hopes if hope.option.goodput >= least]
        for plan in tries:
            worst = self._search.seconds(plan) - batch / best.option.goodput
            if plan.way != best.way and self.ledger.affords(worst):
                return plan
        return None
