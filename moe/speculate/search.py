"""The plan with the highest goodput: expected tokens over predicted seconds, for all modes.

`Search.best` compares modes and depths (SmartSpec's goodput, MoESD's speed-up) and gives a choice
for each sequence, a `DraftPlan`. Depth 0 is always among them: plain decoding is the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from moe.sequence import RunningSequence
from moe.speculate.acceptance import Acceptance
from moe.speculate.cost_model import Depths, Effort, StepCosts
from moe.speculate.draft import Choice, Draft, Mode

CUTS = 12
"""Ways to divide the drafted tokens of a batch that are compared."""
Chain = Sequence[float]
"""Of one sequence: the probability of each position that it and all before it are accepted."""
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


class DraftPlan(NamedTuple):
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


class DecodingSequences(NamedTuple):
    """Who decodes, and what each could draft; see `moe.speculate.draft.Controller.plan`."""

    sequences: Sequence[RunningSequence]
    limits: Sequence[int]
    offers: Sequence[Sequence[Draft]]


def plain(step: DecodingSequences, costs: StepCosts) -> DraftPlan:
    """No drafts."""
    batch = len(step.sequences)
    seconds = costs.verify(batch, batch)
    return DraftPlan(None, (NONE,) * batch, Option((0,) * batch, float(batch), seconds))


def prices(plan: DraftPlan, goodput: float, costs: StepCosts) -> tuple[float, float]:
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

    def best(
        self, step: DecodingSequences, incumbent: Way, caution: float = 1.0, optimism: float = 0.0
    ) -> DraftPlan:
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

    def again(self, step: DecodingSequences, last: DraftPlan, row_price: float) -> DraftPlan:
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
        return DraftPlan(last.mode, tuple(choices), last.option)

    def seconds(self, plan: DraftPlan) -> float:
        """Of a plan in which every planned token is drafted, without any hope."""
        batch, depths = len(plan.choices), [choice.depth for choice in plan.choices]
        seconds = self.costs.verify(batch, batch + sum(depths))
        own = [c.depth for c in plan.choices if c.mode is plan.mode]
        if plan.mode is None or not any(own):
            return seconds
        return seconds + self.costs.draft(plan.mode, max(own), sum(own))

    def _plan(
        self, step: DecodingSequences, mode: Mode | None, free: Sequence[Taken], optimism: float
    ) -> DraftPlan:
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
        return DraftPlan(mode if with_passes else None, choices, option)


def _likeliest(offers: Sequence[Draft], limit: int) -> Taken:
    """Survival of the tokens of the offer of which most are expected to be right, and its mode."""
    best, most = Taken([], None), 0.0
    for offer in offers:
        own = list(accumulate(offer.confidence[:limit], mul))
        if (expected := sum(own)) > most:
            best, most = Taken(own, offer.mode), expected
    return best


class Option(NamedTuple):
    """Depths of all sequences of a step, and what is expected of them."""

    depths: Depths
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def best_option(chains: Sequence[Chain], seconds: Callable[[Depths], float]) -> Option:
    """The depths with the highest goodput, among those that take likelier tokens first.

    Args:
        chains: what each sequence may draft.
        seconds: predicted for a step with such depths.
    """
    accepted = [list(accumulate(chain, initial=0.0)) for chain in chains]
    best = option_of((0,) * len(chains), accepted, seconds)
    for depths in _candidates(chains):
        option = option_of(depths, accepted, seconds)
        if option.goodput > best.goodput:
            best = option
    return best


def option_of(
    depths: Depths, accepted: Sequence[Sequence[float]], seconds: Callable[[Depths], float]
) -> Option:
    """What is expected: of each sequence the accepted tokens, and one that the model adds.

    Args:
        accepted: tokens expected of each sequence by its depth, from depth 0 on.
    """
    tokens = float(len(depths))
    for depth, own in zip(depths, accepted, strict=True):
        tokens += own[depth]
    return Option(depths, tokens, seconds(depths))


def _candidates(chains: Sequence[Chain]) -> Iterator[Depths]:
    for depth in range(1, max(map(len, chains), default=0) + 1):
        yield tuple(min(depth, len(chain)) for chain in chains)
    if len(chains) == 1:
        return
    tokens = sorted(
        (-survival, position, index)
        for index, chain in enumerate(chains)
        for position, survival in enumerate(chain)
    )
    depths, every = [0] * len(chains), max(len(tokens) // CUTS, 1)
    for taken, (_, position, index) in enumerate(tokens, 1):
        depths[index] = position + 1
        if taken % every == 0:
            yield tuple(depths)
