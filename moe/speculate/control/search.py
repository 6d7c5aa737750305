"""The best way to draft in a step, over all modes: from what is known to a choice a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from moe.sequence import RunningSequence
from moe.speculate.control.acceptance import Acceptance
from moe.speculate.control.goodput import Option, best_option
from moe.speculate.control.steps import Effort, StepCosts
from moe.speculate.draft import Choice, Draft, Mode

LOYALTY = 1.02
"""How much better than the last way another one must look."""

Way = tuple[Mode | None, int]
"""Mode and depth of a plan, that of the sequence that drafts most."""
PLAIN: Way = (None, 0)
NONE = Choice()
CAUTION = 1.02
"""How much better than plain decoding drafting must look."""


class Taken(NamedTuple):
    """Of a sequence: the probability of each token that it and all before it are right."""

    chain: list[float]
    mode: Mode | None


class Plan(NamedTuple):
    """What was decided for a step.

    Attributes:
        mode: of the drafts that take passes of the model.
        choices: one a sequence.
        option: what is expected of them.
        trial: something better is known.
    """

    mode: Mode | None
    choices: tuple[Choice, ...]
    option: Option
    trial: bool = False

    @property
    def way(self) -> Way:
        return self.mode, max(self.option.depths, default=0)


class Step(NamedTuple):
    """Who decodes, and what each could draft; see `moe.speculate.draft.Controller.plan`."""

    sequences: Sequence[RunningSequence]
    limits: Sequence[int]
    offers: Sequence[Sequence[Draft]]


def plain(step: Step, costs: StepCosts) -> Plan:
    """No drafts."""
    batch = len(step.sequences)
    seconds = costs.verify(batch, batch)
    return Plan(None, (NONE,) * batch, Option((0,) * batch, float(batch), seconds))


def prices(plan: Plan, goodput: float, costs: StepCosts) -> tuple[float, float]:
    """What drafting one more token, and verifying one more, have to bring, in tokens.

    Args:
        goodput: of the best that is known, which counts where the model itself drafts; offers come
            and go, so that whoever leaves one decodes plainly meanwhile.
    """
    batch, depth = len(plan.choices), max(plan.option.depths)
    a_pass = 0.0
    if plan.mode is None:
        goodput = batch / costs.verify(batch, batch)
    else:
        drafted = depth * sum(choice.mode is plan.mode for choice in plan.choices)
        a_pass = costs.draft(plan.mode, depth, drafted) / drafted
    return goodput * a_pass, goodput * costs.row(batch)


@dataclass(frozen=True)
class Search:
    """Finds the plan with the highest goodput.

    Args:
        modes: that draft with passes of the model; one of them at most is used in a step.
        acceptance, costs: what is known.
    """

    modes: Sequence[Mode]
    acceptance: Acceptance
    costs: StepCosts

    def best(self, step: Step, incumbent: Way, caution: float = 1.0, optimism: float = 0.0) -> Plan:
        """
        Args:
            incumbent: the way that needs to be beaten clearly.
            caution: how much better than plain decoding drafting must look.
            optimism: standard deviations by which acceptance may be better than is known.
        """
        free = [_likeliest(*own) for own in zip(step.offers, step.limits, strict=True)]
        best = plain(step, self.costs)
        score = best.option.goodput * caution
        for mode in (None, *self.modes):
            if mode is None and not any(chain for chain, _ in free):
                continue
            plan = self._plan(step, mode, free, optimism)
            own_score = plan.option.goodput * (LOYALTY if plan.way == incumbent else 1.0)
            if own_score > score:
                best, score = plan, own_score
        return best

    def again(self, step: Step, last: Plan, row_price: float) -> Plan:
        """The same way as in the step before, for as many sequences, without a search.

        Args:
            row_price: tokens that reading one more has to bring.
        """
        choices = list[Choice]()
        for index, sequence in enumerate(step.sequences):
            limit, before = step.limits[index], last.choices[index]
            depth = min(before.depth, limit) if before.mode is last.mode else 0
            chain, mode = _likeliest(step.offers[index], limit)
            kept = [survival for survival in chain if survival >= row_price]
            if depth and before.mode is not None:
                planned = self.acceptance.planned(sequence, before.mode)[:depth]
                if sum(planned) >= sum(kept):
                    kept, mode = planned, before.mode
            choices.append(Choice(mode, len(kept)) if kept else NONE)
        return Plan(last.mode, tuple(choices), last.option)

    def seconds(self, plan: Plan) -> float:
        """Of a plan in which every planned token is drafted, without any hope."""
        batch, depths = len(plan.choices), [choice.depth for choice in plan.choices]
        seconds = self.costs.verify(batch, batch + sum(depths))
        own = [c.depth for c in plan.choices if c.mode is plan.mode]
        if plan.mode is None or not any(own):
            return seconds
        return seconds + self.costs.draft(plan.mode, max(own), sum(own))

    def _plan(self, step: Step, mode: Mode | None, free: Sequence[Taken], optimism: float) -> Plan:
        chains, takers = [chain for chain, _ in free], [own for _, own in free]
        effort: Effort = ((), ())
        if mode is not None:
            effort = self.acceptance.positions[mode].effort()
            for index, sequence in enumerate(step.sequences):
                own = self.acceptance.planned(sequence, mode, optimism)[: step.limits[index]]
                if sum(own) > sum(chains[index]):
                    chains[index], takers[index] = own, mode
        drafting = [mode is not None and taker is mode for taker in takers]
        seconds = partial(self.costs.step, mode, drafting, effort, optimism > 0)
        option = best_option(chains, seconds)
        choices = tuple(
            Choice(taker, depth) if depth else NONE
            for taker, depth in zip(takers, option.depths, strict=True)
        )
        with_passes = mode is not None and any(choice.mode is mode for choice in choices)
        return Plan(mode if with_passes else None, choices, option)


def _likeliest(offers: Sequence[Draft], limit: int) -> Taken:
    """Survival of the tokens of the offer of which most are expected to be right, and its mode."""
    best, most = Taken([], None), 0.0
    for offer in offers:
        own = list(accumulate(offer.confidence[:limit], mul))
        if (expected := sum(own)) > most:
            best, most = Taken(own, offer.mode), expected
    return best
