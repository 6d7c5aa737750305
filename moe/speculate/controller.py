"""How far to draft, and how: the most tokens a second, as far as is known.

`AutoController` takes what model-free drafts offer where it pays beside plain decoding. Of drafts
by the model itself it uses the best known plan (`Planner`, searched for as often as a share of the
time allows), and now and then tries one that luck could make better (`Budget`). It drafts nothing
that could lose more than the `Account` has room for. It knows no tensors, so it runs in
simulations too (`python -m benchmarks.speculation --parts account`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

from torch import nn

from kernels import QuantizedExperts
from kernels.planes import PREFIX_BITS
from moe.loading.hub import experts_per_token
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.sequence import RunningSequence
from moe.speculate.acceptance import Acceptance
from moe.speculate.account import OUTLIER, TRUST, UNSPENT, Account, Looking, Upkeep, typical
from moe.speculate.cost_model import Counter, Counts, ExpertSizes, StepCosts
from moe.speculate.draft import Choice, Controller, Draft, Mode, Plain, Round
from moe.speculate.search import (
    CAUTION,
    LOYALTY,
    NONE,
    PLAIN,
    DecodingSequences,
    DraftPlan,
    Search,
    prices,
)
from offload.layer import OffloadedExperts, held_experts

OPTIMISM = 2.0
"""Standard deviations by which a trial is hoped to do better than is known."""
KEPT = 2.0
"""Plain steps' time that trials leave in the account for drafts that look good already."""
PLANNING = 0.0025
"""Share of the time that searching for the best plan may take; between searches plans stand."""
LEARNING = 0.005
"""Share of the time that learning may take; then only some steps are learnt from."""
MEMORY, DISK = 12e9, 1e9
"""Bytes a second that are assumed until steps have been measured; their proportion matters."""
OPERATIONS = 1e11
"""The same of multiplications."""


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
        self._plan: DraftPlan | None = None  # of this step, where passes of the model draft
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
            self._plan = self._planner.plan(DecodingSequences(sequences, limits, offers))
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

    def _settle(
        self, plan: DraftPlan | None, round: Round, counts: Counts | None, took: float
    ) -> None:
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

    def _learn(self, plan: DraftPlan | None, round: Round, counts: Counts | None) -> None:
        for trial, choice in zip(round.trials, plan.choices if plan else (), strict=False):
            if choice.mode in self.acceptance.positions:
                own = trial.confidence, trial.drafted, trial.accepted
                self.acceptance.observe(trial.sequence, choice.mode, choice.depth, *own)
        if round.alone:
            self.costs.observe(None if plan is None else plan.mode, round, counts)


@dataclass(frozen=True)
class Budget:
    """Judges plans by what they cost if nothing that they draft is accepted."""

    search: Search
    account: Account

    def trial(self, step: DecodingSequences, best: DraftPlan) -> DraftPlan | None:
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

    def within(self, plan: DraftPlan) -> DraftPlan | None:
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

    def _risk(self, plan: DraftPlan) -> float:
        """Seconds that a plan loses against plain decoding if nothing is accepted."""
        batch = len(plan.choices)
        return self.search.seconds(plan) - self.search.costs.verify(batch, batch)


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
        self.best: DraftPlan | None = None
        self.prices = 0.0, 0.0
        self.wakes = 0 if search.modes else inf
        self._clock = clock
        self._next = 0  # step of the next search
        self._tried = False  # something since the last one
        self._searching = Upkeep(PLANNING)

    def plan(self, step: DecodingSequences) -> DraftPlan | None:
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

    def _search(self, step: DecodingSequences) -> DraftPlan:
        start, before = self._clock(), PLAIN if self.best is None else self.best.way
        best = self.search.best(step, before, CAUTION)
        plan = self.budget.trial(step, best) or best
        self.best, self._tried = best, plan.trial
        self.prices = prices(plan, best.option.goodput, self.search.costs)
        self._searching.took(self._clock() - start)
        every = 1 + self._searching.steps(best.option.seconds)
        self._next = self.search.acceptance.step + every
        return plan


class Offered:
    """Judges them beside plain decoding: offers come and go, and where one is left a sequence
    decodes plainly meanwhile."""

    def __init__(self, costs: StepCosts, account: Account) -> None:
        self._costs, self._account = costs, account

    def choose(self, offers: Sequence[Sequence[Draft]]) -> Sequence[Choice] | None:
        """A choice for each sequence; None where all together are not worth it, or could lose more
        than there is room for."""
        if not any(offers):
            return None
        costs, batch, choices = self._costs, len(offers), list[Choice]()
        step, row = costs.verify(batch, batch), costs.row(batch)
        price, rows, gained = row * batch / step, batch, 0.0
        for own in offers:
            best, most = NONE, 0.0
            for draft in own:
                depth, survival, expected = 0, 1.0, 0.0
                for chance in draft.confidence:
                    survival *= chance
                    if survival < price:
                        break
                    depth, expected = depth + 1, expected + survival
                if expected > most:
                    best, most = Choice(draft.mode, depth), expected
            choices.append(best)
            rows, gained = rows + best.depth, gained + most
        seconds = costs.verify(batch, rows) + costs.overhead
        if (batch + gained) * step <= CAUTION * batch * seconds:
            return None
        return choices if self._account.affords(seconds - step, TRUST * step) else None


def control_figures(
    best: DraftPlan | None, costs: StepCosts, account: Account, acceptance: Acceptance
) -> dict[str, Any]:
    """For JSON; what is predicted is None before the first step.

    Args:
        best: the plan that was best at the last search.
    """
    predicted, errors = None, costs.errors.medians()
    if best is not None:
        batch = len(best.choices)
        predicted = best.option.goodput * costs.verify(batch, batch) / batch
    return {
        "predicted_gain": predicted,
        "measured_gain": account.gain,
        "target_efficiency": costs.efficiency.as_dict(),
        "prediction_error": errors["step"],
        "prediction_error_together": errors["together"],
        "trials": account.trials,
        "mode": None if best is None or best.mode is None else best.mode.name,
        "depth": 0 if best is None else best.way[1],
        "expected_acceptance": {
            mode.name: list(rates.rates(acceptance.step))
            for mode, rates in acceptance.positions.items()
        },
    }


def make_controller(
    backbone: Backbone, experts: MoELayers, modes: Sequence[Mode], max_depth: int
) -> AutoController:
    """One that knows nothing yet but sizes."""
    layers = experts.layers
    top_k = float(experts_per_token(backbone.model.config))
    total = sum(layer.num_experts for layer in layers)
    first = layers[0]
    slots = first.cache.slots if isinstance(first, OffloadedExperts) else total
    visits = top_k * len(layers)
    size = sum(layer.expert_bytes for layer in layers) / len(layers)
    others = trunk_bytes(backbone)
    prices = (
        others / MEMORY,
        (others + visits * size) / OPERATIONS,
        size / MEMORY,
        size / DISK,
    )
    whole = others + visits * size
    relative = {
        mode: (others + visits * size * _share(mode, layers, top_k)) / whole for mode in modes
    }
    costs = StepCosts(ExpertSizes(total, visits, slots), prices, relative)
    return AutoController(modes, max_depth, costs, ExpertCounts(experts))


def trunk_bytes(backbone: Backbone) -> int:
    """Bytes that every pass reads: all weights but experts and the embeddings of the input."""
    model, head = backbone.model, backbone.model.get_output_embeddings()
    skipped = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not getattr(head, "weight", None)
    }
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if id(t) not in skipped)


def _share(mode: Mode, layers: Sequence[object], top_k: float) -> float:
    """Of the bytes of a token's experts that a draft of this mode reads."""
    held = held_experts(layers[0])  # type: ignore[arg-type]
    bits = PREFIX_BITS[len(held.planes[0]) - 1] if isinstance(held, QuantizedExperts) else 16
    share = min((mode.bits or bits) / bits, 1.0) * (1 - mode.skipped)
    return share * min((mode.experts or top_k) / top_k, 1.0)


class ExpertCounts:
    """Distinct experts of steps, and the missing ones among them, as a cache of experts counts
    them. Where all are in memory nothing is counted: what steps took says enough, and to count
    what routing statistics have put off takes longer than a step.
    """

    def __init__(self, experts: MoELayers) -> None:
        caches = [layer.cache for layer in experts.layers if isinstance(layer, OffloadedExperts)]
        self._layers = caches[0].statistics.layers if caches else ()
        self._before = 0.0, 0.0

    def start(self) -> None:
        """A step begins, or several that are counted together."""
        self._before = self._total()

    def read(self) -> Counts | None:
        """What has been visited since; None where it was not counted, or statistics began anew."""
        pairs = zip(self._total(), self._before, strict=True)
        distinct, missing = (now - before for now, before in pairs)
        return (distinct, missing) if distinct > 0 <= missing else None

    def _total(self) -> Counts:
        missing = sum(layer.misses for layer in self._layers)
        return float(missing + sum(layer.hits for layer in self._layers)), float(missing)
