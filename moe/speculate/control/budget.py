"""Which plans may be carried out: none that could lose more than the account has room for."""

from __future__ import annotations

from dataclasses import dataclass

from moe.speculate.control.account import UNSPENT, Account
from moe.speculate.control.search import LOYALTY, PLAIN, Plan, Search, Step
from moe.speculate.draft import Choice

OPTIMISM = 2.0
"""Standard deviations by which a trial is hoped to do better than is known."""
KEPT = 2.0
"""Plain steps' time that trials leave in the account for drafts that look good already."""


@dataclass(frozen=True)
class Budget:
    """Judges plans by what they cost if nothing that they draft is accepted."""

    search: Search
    account: Account

    def trial(self, step: Step, best: Plan) -> Plan | None:
        """Something else than the best that is known, where luck could make it better; the search
        for it takes time, too, and waits until there is room."""
        batch = len(best.choices)
        if self.steps_until_trial(batch) > 0:
            return None
        least = LOYALTY * best.option.goodput
        short = step._replace(limits=[min(limit, 1) for limit in step.limits])
        for each in (step, short):
            hope = self.search.best(each, PLAIN, optimism=OPTIMISM)
            if hope.option.goodput < least or hope.way == best.way:
                continue
            lost = self.search.seconds(hope) - len(best.choices) / best.option.goodput
            kept = KEPT * self.search.costs.verify(batch, batch)
            if self.account.affords(self._risk(hope) + kept) and self.account.affords_trial(lost):
                return hope._replace(trial=True)
        return None

    def steps_until_trial(self, batch: int) -> int:
        """Plain steps after which there is room for the least trial; 0 if there is now."""
        step, least = self.search.costs.verify(batch, batch), self._least_risk(batch)
        room = min(least / step + KEPT, UNSPENT)
        return max(self.account.steps_until(room, step), self.account.until_trial(least, step))

    def within(self, plan: Plan) -> Plan | None:
        """A plan, or the beginning of it for which there is room."""
        deepest = max(choice.depth for choice in plan.choices)
        while deepest and not self.account.affords(self._risk(plan)):
            deepest //= 2
            choices = tuple(
                Choice(choice.mode, min(choice.depth, deepest)) if deepest else Choice()
                for choice in plan.choices
            )
            plan = plan._replace(choices=choices)
        return plan if deepest else None

    def _least_risk(self, batch: int) -> float:
        """Seconds that the least trial loses if nothing is accepted."""
        costs = self.search.costs
        passes = [costs.draft(mode, 1, 1) for mode in self.search.modes]
        row = costs.verify(batch, batch + 1) - costs.verify(batch, batch)
        return min(passes, default=0.0) + max(row, 0.0)

    def _risk(self, plan: Plan) -> float:
        """Seconds that a plan loses against plain decoding if nothing is accepted."""
        batch = len(plan.choices)
        return self.search.seconds(plan) - self.search.costs.verify(batch, batch)
