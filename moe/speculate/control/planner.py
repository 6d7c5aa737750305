"""The best plan that is known, searched for as often as a share of the time allows."""

from __future__ import annotations

from collections.abc import Callable

from moe.speculate.control.account import Account
from moe.speculate.control.budget import Budget
from moe.speculate.control.search import PLAIN, Plan, Search, Step, prices
from moe.speculate.control.upkeep import Upkeep

CAUTION = 1.02
"""How much better than plain decoding drafting must look."""
PLANNING = 0.0025
"""Share of the time that searching for the best plan may take; between searches plans stand."""


class Planner:
    """Plans steps.

    Args:
        clock: measures how long a search takes.

    Attributes:
        best: that was known at the last search; None before the first.
        prices: tokens that a pass more, and a row more, have to bring.
    """

    def __init__(self, search: Search, account: Account, clock: Callable[[], float]) -> None:
        self.search, self.budget = search, Budget(search, account)
        self.best: Plan | None = None
        self.prices = 0.0, 0.0
        self._clock = clock
        self._searched, self._every = 0, 1
        self._searching = Upkeep(PLANNING)

    def plan(self, step: Step, idle: bool) -> Plan:
        """What to do; ``idle``: nothing that has paid is in sight."""
        if self.best is not None and self.stands(len(step.sequences), idle):
            plan = self.search.again(step, self.best, self.prices[1])
        else:
            plan = self._search(step)
        return self.budget.within(step, plan)

    def stands(self, batch: int, idle: bool) -> bool:
        """Whether the best that is known is for such steps, and no search is due."""
        if self.best is None or batch != len(self.best.choices):
            return False
        if self.search.acceptance.step >= self._searched + self._every:
            return False
        return not (idle and self.budget.may_try(batch))

    def _search(self, step: Step) -> Plan:
        start, before = self._clock(), PLAIN if self.best is None else self.best.way
        best = self.search.best(step, before, CAUTION)
        plan = self.budget.trial(step, best) or best
        self.best = best
        self.prices = prices(plan, best.option.goodput, self.search.costs)
        self._searched = self.search.acceptance.step
        self._searching.took(self._clock() - start)
        self._every = 1 + self._searching.steps(best.option.seconds)
        return plan
