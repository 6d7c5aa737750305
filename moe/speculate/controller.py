"""Chooses how each decoding step drafts: by the most tokens a second that are to be expected.

`AutoController` compares three ways for every step: plain decoding, the drafts that model-free
modes offer, and drafts by passes, of the model itself (elastic) or of its multi-token-prediction
layer. Each is judged by its goodput, expected tokens over predicted seconds (SmartSpec). Offers
state their own chances. What drafts by passes bring is learned from trials that the `Account` of
losses pays for: acceptance by position, and the time of a pass. The controller touches no tensors,
so it also runs in simulations (`python -m benchmarks.speculation --parts account`).

Times are in plain steps of the same sequences, goodput in units of plain decoding's, unless a
docstring says seconds. A drafted token costs as many plain steps as it must bring tokens to be
worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from math import isnan, sqrt
from operator import mul
from typing import Any, NamedTuple

from moe.sequence import RunningSequence
from moe.speculate.account import TRUST, Account, Looking, typical
from moe.speculate.draft import Choice, Controller, Draft, Mode, Plain, Round, Stop, Trial
from moe.speculate.step_times import OUTLIER, Line, StepTimes

CAUTION = 1.02
"""Goodput that offers must have."""
LOYALTY = 1.02
"""Factor over the best known goodput that a trial must be hoped to reach."""
OPTIMISM = 2.0
"""Standard deviations that are added to an acceptance rate to get the hoped one."""
KEPT = 2.0
"""Plain steps that trials leave in the account for offers."""
FIRST, FIRST_MTP, DOUBT = 0.35, 0.6, 4.0
"""Acceptance rate assumed of an untried mode, too low to use elastic drafts without a trial; of a
layer, which was trained to draft; and the tokens that this assumption weighs."""
KEEP, FADE = 0.995, 0.998
"""Weights of a token after the next draft of its mode, and after each step."""
POSITIONS = 4
"""Positions of a draft whose acceptance is learned one by one; those after them share the last."""
RISE = 0.1
"""Most by which a position may accept more than the one before it. Where the first ones begin to
fail, what is known of deeper ones is old, as they are not reached any more."""
PASS, PASS_MTP, HOPED_PASS = 0.7, 0.25, 0.1
"""Assumed times of a draft pass before one has been measured, of the model itself and of one layer;
and the time that is hoped for."""
FOLLOW = 0.1
"""Weight of the last draft in what a pass takes."""
BELIEF = 32.0
"""Plain steps of measurements that weigh as much as the predicted goodput of elastic drafts."""
NONE = Choice()


class AutoController(Controller):
    """Chooses how each step drafts. See `moe.speculate.draft.Controller`.

    Args:
        modes: drafts by passes that it may use.
    """

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.times, self.account = StepTimes(), Account()
        self._looking = Looking()
        self._arms = {mode: PassArm(mode) for mode in modes}
        self._plan: DraftPlan | None = None  # of this step
        self._passes: DraftPlan | None = None  # the best known when last compared
        self._prices = 0.0, 0.0  # tokens that a draft pass, and a drafted token, have to bring

    def rests(self, batch: int) -> int:
        """Plain steps to come before the controller is asked again."""
        return self._looking.rests(batch)

    def rested(self, plain: Plain) -> None:
        """Learn from plain steps."""
        self._fade(len(plain.seconds) - plain.looks)
        if known := [each for each in plain.seconds if not isnan(each)]:
            steps, step = len(known), typical(known)
            self.times.add_plain(plain.batch, step, steps)
            self.account.earn(steps * step, step)
            self.account.settle(plain.looking, 0.0, step)
            self._looking.plainly(step, plain.looks, plain.looking)

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice] | None:
        """One choice for each running sequence; None if all are to decode plainly, as they do until
        plain steps of this many sequences have been measured."""
        self._fade(1)
        self._plan = self._choose(limits, offers) if self.times.plain(len(limits)) else None
        if self._plan is None:
            self._looking.missed()
            return None
        return self._plan.choices

    def stop(self, mode: Mode) -> Stop:
        return Stop(self._arms[mode].acceptances(POSITIONS), sum(self._prices))

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        """Tokens of a draft that are likely enough to pay for reading them."""
        return sum(each >= self._prices[1] for each in self._arms[mode].survival(confidence))

    def observe(self, round: Round) -> None:
        """A step with drafts is over: learn from it."""
        plan = self._plan
        if plan is None or len(round.trials) != len(plan.choices):
            return  # the step failed for some of the sequences
        if plan.arm is not None:
            plan.arm.learn(round.trials)
        if round.alone:
            self._settle(plan, round)

    def figures(self) -> dict[str, Any]:
        """Return what has been learned, and what came of it, for JSON."""
        best = self._passes
        return {
            "predicted_gain": self.account.predicted_gain,
            "measured_gain": self.account.gain,
            **self.times.figures(),
            "trials": self.account.trials,
            "mode": None if best is None or best.arm is None else best.arm.mode.name,
            "depth": 0 if best is None else max(choice.depth for choice in best.choices),
            "expected_acceptance": {
                mode.name: arm.acceptance(0) for mode, arm in self._arms.items()
            },
        }

    def _choose(self, limits: Sequence[int], offers: Sequence[Sequence[Draft]]) -> DraftPlan | None:
        """The best known drafts, or a trial of others; None for plain decoding."""
        if not max(limits):
            return None
        line, step = self.times.line(len(limits)), self.times.plain(len(limits))
        offered = self._offered(line, offers)
        self._passes = self._best_by_passes(line, limits)
        known = 1.0 if self._passes is None else self._passes.goodput
        if offered is not None and offered.goodput >= known:
            return offered
        plan = self._trial(line, limits, known) or self._passes
        if plan is None or not self.account.affords(plan.seconds - step):
            return offered
        assert plan.arm is not None
        self._prices = known * plan.arm.expected_pass, known * line.slope
        return plan

    def _offered(self, line: Line, offers: Sequence[Sequence[Draft]]) -> DraftPlan | None:
        """Choose for each sequence the offer with the most expected tokens, cut where tokens are
        not worth their rows; None if all together do not pay."""
        if not any(offers):
            return None
        batch, choices, gained = len(offers), list[Choice](), 0.0
        for own in offers:
            best, most = NONE, 0.0
            for draft in own:
                survival = accumulate(draft.confidence, mul)
                kept = [each for each in survival if each >= line.slope]
                if sum(kept) > most:
                    best, most = Choice(draft.mode, len(kept)), sum(kept)
            choices.append(best)
            gained += most
        step = self.times.plain(batch)
        seconds = self.times.verify(batch, batch + sum(choice.depth for choice in choices))
        goodput = (1 + gained / batch) * step / seconds
        if goodput <= CAUTION or not self.account.affords(seconds - step, TRUST * step):
            return None
        return DraftPlan(choices, seconds, goodput)

    def _best_by_passes(self, line: Line, limits: Sequence[int]) -> DraftPlan | None:
        """Drafts by passes with the best goodput known; None if plain decoding is better."""
        best, most = None, 1.0
        for arm in self._arms.values():
            goodput, depth = arm.best(max(limits), line)
            if goodput > most:
                best, most = self._with_arm(arm, depth, limits, goodput), goodput
        return best

    def _trial(self, line: Line, limits: Sequence[int], known: float) -> DraftPlan | None:
        """Drafts by passes that could turn out better than the best known goodput, or the first few
        tokens of such, if the account has room for them."""
        if not self.account.affords_trial(0.0):
            return None
        step, best, most = self.times.plain(len(limits)), None, LOYALTY * known
        for arm in self._arms.values():
            for deepest in (max(limits), 3, 2, 1):
                hope, depth = arm.best(min(deepest, max(limits)), line, OPTIMISM)
                if hope <= most:
                    continue
                plan = self._with_arm(arm, depth, limits, arm.goodput(depth, line), known)
                risk = plan.seconds - step + KEPT * step
                loss = plan.seconds * (1 - plan.goodput / known)
                if self.account.affords(risk) and self.account.affords_trial(loss):
                    best, most = plan, hope
        return best

    def _with_arm(
        self, arm: PassArm, depth: int, limits: Sequence[int], goodput: float, bar: float = 0.0
    ) -> DraftPlan:
        """Drafts by passes of ``depth`` tokens, as far as each sequence may."""
        choices = [Choice(arm.mode, min(depth, limit)) if limit else NONE for limit in limits]
        batch, drafted = len(limits), sum(choice.depth for choice in choices)
        seconds = self.times.verify(batch, batch + drafted)
        seconds += depth * arm.expected_pass * self.times.plain(batch)
        return DraftPlan(choices, seconds, goodput, arm, bar)

    def _settle(self, plan: DraftPlan, round: Round) -> None:
        """Learn from the time of a step, and charge it to the account."""
        batch, passes = len(round.trials), len(round.draft_rows)
        step, drafting = self.times.plain(batch), round.draft_seconds
        if round.rows > batch:
            looking = 0.0 if passes else drafting
            self.times.add(batch, round.rows, round.verify_seconds + looking)
        seconds = drafting + round.verify_seconds
        seconds = min(seconds, OUTLIER * max(plan.seconds, step))
        worth = step * (1 + sum(trial.accepted for trial in round.trials) / batch)
        self.account.settle(seconds, worth, step, (plan.goodput - 1) * seconds)
        if plan.arm is not None and passes:
            plan.arm.compare(worth / step, plan.goodput * seconds / step)
            # One that also reads what came since the last draft says little of those that follow.
            if round.draft_rows[0] <= batch * (1 + max(choice.depth for choice in plan.choices)):
                plan.arm.took(drafting / passes / step)
        if plan.bar:
            self.account.tried(seconds - worth / plan.bar)
        else:
            self._looking.found((worth - seconds) / step)

    def _fade(self, steps: int) -> None:
        for arm in self._arms.values():
            arm.fade(steps)


class DraftPlan(NamedTuple):
    """The drafts of a step.

    Attributes:
        choices: one for each sequence.
        seconds: predicted for the step, if no draft stops early.
        goodput: expected.
        arm: record of the mode of passes; None for offers.
        bar: in a trial, the best known goodput, against which its loss counts; else 0.
    """

    choices: Sequence[Choice]
    seconds: float
    goodput: float
    arm: PassArm | None = None
    bar: float = 0.0


class PassArm:
    """The record of drafts by passes in one mode.

    The first trial already measures what a pass takes. A mode whose passes cost too much is not
    tried again, whatever acceptance may be hoped for. A position that has been verified little is
    believed to accept as the one before it.

    Attributes:
        pass_time: of a draft pass; None before one has been measured.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.pass_time: float | None = None
        by_layer = mode.source == "mtp"
        self._first, self._pass = (FIRST_MTP, PASS_MTP) if by_layer else (FIRST, PASS)
        self._accepted = [0.0] * POSITIONS  # tokens at each position, fading
        self._verified = [0.0] * POSITIONS
        self._worth = self._foreseen = BELIEF  # plain steps, fading

    @property
    def expected_pass(self) -> float:
        """The time of a pass, measured or assumed."""
        return self._pass if self.pass_time is None else self.pass_time

    def acceptance(self, position: int, optimism: float = 0.0) -> float:
        """Probability that the token at a position is accepted if those before it were.

        Args:
            position: in the draft, from 0 on.
            optimism: standard deviations to add.
        """
        mean, weight = self._first, DOUBT
        seen = zip(self._accepted, self._verified, strict=True)
        for at, (accepted, verified) in enumerate(islice(seen, position + 1)):
            own = (accepted + DOUBT * mean) / (verified + DOUBT)
            mean = min(own, mean + RISE) if at else own
            weight += verified
        return min(mean + optimism * sqrt(mean * (1 - mean) / (weight + 1)), 0.99)

    def acceptances(self, count: int) -> tuple[float, ...]:
        """The same of the first ``count`` positions."""
        return tuple(self.acceptance(position) for position in range(count))

    def survival(self, confidence: Sequence[float]) -> list[float]:
        """Return the probability of each drafted token that it and all before it are accepted: half
        by its confidence, half by how often tokens at its position are accepted."""
        chances = (
            (each + self.acceptance(position)) / 2 for position, each in enumerate(confidence)
        )
        return list(accumulate(chances, mul))

    def goodput(self, depth: int, line: Line, optimism: float = 0.0) -> float:
        """Return the goodput of drafts of ``depth`` tokens: by acceptance and times, corrected by
        how well such predictions have held.

        Args:
            line: what verification takes.
            optimism: as in `acceptance`; above 0, an unknown pass is hoped to be short.
        """
        chances = (self.acceptance(position, optimism) for position in range(depth))
        tokens = 1 + sum(accumulate(chances, mul))
        unknown = self.pass_time is None and optimism
        pass_time = HOPED_PASS if unknown else self.expected_pass
        took = 1 + line.start + depth * (line.slope + pass_time)
        return tokens / took * self._worth / self._foreseen

    def best(self, deepest: int, line: Line, optimism: float = 0.0) -> tuple[float, int]:
        """The best goodput of 1 to ``deepest`` tokens, and its depth: behind it, it only falls."""
        best, depth = self.goodput(1, line, optimism), 1
        while depth < deepest:
            more = self.goodput(depth + 1, line, optimism)
            if more <= best:
                break
            best, depth = more, depth + 1
        return best, depth

    def fade(self, steps: int) -> None:
        """This many steps have passed: what was accepted before counts less."""
        kept = FADE**steps
        self._accepted = [kept * each for each in self._accepted]
        self._verified = [kept * each for each in self._verified]

    def learn(self, trials: Sequence[Trial]) -> None:
        """The model has verified these drafts."""
        for trial in trials:
            # All grow old, also those that are not reached.
            self._accepted = [KEEP * each for each in self._accepted]
            self._verified = [KEEP * each for each in self._verified]
            for position in range(min(trial.accepted + 1, trial.drafted)):
                at = min(position, POSITIONS - 1)
                self._accepted[at] += position < trial.accepted
                self._verified[at] += 1

    def took(self, pass_time: float) -> None:
        """Each pass of the last draft took so long."""
        known = self.pass_time or pass_time
        self.pass_time = known + FOLLOW * (min(pass_time, OUTLIER * known) - known)

    def compare(self, worth: float, foreseen: float) -> None:
        """A step made tokens worth this many plain steps; ``foreseen`` were predicted with the
        correction known then."""
        foreseen *= self._foreseen / self._worth
        self._worth = KEEP * self._worth + (1 - KEEP) * BELIEF + worth
        self._foreseen = KEEP * self._foreseen + (1 - KEEP) * BELIEF + foreseen
