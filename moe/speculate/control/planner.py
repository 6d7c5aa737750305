"""Which drafts by the model itself to make: the best that is known, searched for as often as a
share of the time allows."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from moe.speculate.control.account import Account
from moe.speculate.control.budget import Budget
from moe.speculate.control.search import CAUTION, PLAIN, Plan, Search, Step, prices
from moe.speculate.control.upkeep import Upkeep

PLANNING = 0.0025
"""Share of the time that searching for the best plan may take; between searches plans stand."""


class Planner:
    """Plans steps.

    Args:
        clock: measures how long a search takes.

    Attributes:
        best: that was known at the last search; None before the first.
        prices: tokens that a pass more, and a row more, have to bring.
        wakes: the step from which on `plan` has something to say: while no such drafts are made,
            when there is room for a trial.
    """

    def __init__(self, search: Search, account: Account, clock: Callable[[], float]) -> None:
        self.search, self.budget = search, Budget(search, account)
        self.best: Plan | None = None
        self.prices = 0.0, 0.0
        self.wakes = 0 if search.modes else inf
        self._clock = clock
        self._next = 0  # step of the next search
        self._tried = False  # something since the last one
        self._searching = Upkeep(PLANNING)

    def plan(self, step: Step) -> Plan | None:
        """What to draft; None where nothing by the model itself."""
        now, best, batch = self.search.acceptance.step, self.best, len(step.sequences)
        if best is not None and best.mode is not None:
            stands = now < self._next and batch == len(best.choices)
            plan = self.search.again(step, best, self.prices[1]) if stands else self._search(step)
        elif best and not self._tried and (left := self.budget.steps_until_trial(batch)):
            self.wakes = now + left
            return None
        else:
            plan = self._search(step)
        assert self.best is not None
        self.wakes = self._next if self.best.mode is None else now + 1
        return None if plan.mode is None else self.budget.within(plan)

    def _search(self, step: Step) -> Plan:
        start, before = self._clock(), PLAIN if self.best is None else self.best.way
        best = self.search.best(step, before, CAUTION)
        plan = self.budget.trial(step, best) or best
        self.best, self._tried = best, plan.trial
        self.prices = prices(plan, best.option.goodput, self.search.costs)
        self._searching.took(self._clock() - start)
        every = 1 + self._searching.steps(best.option.seconds)
        self._next = self.search.acceptance.step + every
        return plan
