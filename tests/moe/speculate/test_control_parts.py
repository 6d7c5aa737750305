"""What the controller of speculation is made of: coverage, times, rates, goodput, reports."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.sequence import RunningSequence
from moe.speculate.acceptance import Calibration, PositionRates
from moe.speculate.account import (
    BURST,
    CREDIT,
    EVERY,
    FIRST,
    SHARE,
    TRUST,
    UNSPENT,
    Account,
    Looking,
)
from moe.speculate.account import LOOKING_SHARE as LOOKED
from moe.speculate.cost_model import Coverage, ExpertSizes, StepCosts, Times
from moe.speculate.draft import Mode, Round, Trial
from moe.speculate.report import Report
from moe.speculate.search import best_option

MODE = Mode("elastic", bits=4)


@given(
    experts=st.integers(8, 256),
    top_k=st.integers(1, 8),
    rows=st.integers(1, 100),
    resident=st.floats(0.1, 1.0),
)
def test_coverage_keeps_to_its_bounds(experts: int, top_k: int, rows: int, resident: float) -> None:
    coverage = Coverage(ExpertSizes(experts, min(top_k, experts), max(1, int(resident * experts))))
    distinct, missing = coverage.distinct(1, rows), coverage.missing(1, rows)
    assert coverage.distinct(1, 1) == pytest.approx(min(top_k, experts))
    assert 0 <= missing <= distinct + 1e-6 <= experts + 1e-5
    assert coverage.distinct(1, rows + 1) >= distinct


@pytest.mark.parametrize(("a", "b", "hits"), [(0.7, 0.5, 0.9), (1.0, 1.0, 0.5)])
def test_coverage_is_learnt(a: float, b: float, hits: float) -> None:
    sizes = ExpertSizes(1024, 64, 512)
    truth, learnt = Coverage(sizes), Coverage(sizes)
    truth.exponents, truth.hits = (a, b), hits
    for step in range(200):
        sequences, per = (1, 2, 4)[step % 3], (1, 3, 5)[step % 5 % 3]
        rows = sequences * per
        visited = truth.distinct(sequences, rows), truth.missing(sequences, rows)
        learnt.observe(sequences, rows, visited[0])
        learnt.follow(sequences, rows, visited[1])
    assert learnt.exponents == pytest.approx((a, b), abs=0.05)
    assert learnt.hits == pytest.approx(hits, abs=0.02)
    assert learnt.distinct(8, 32) == pytest.approx(truth.distinct(8, 32), rel=0.05)
    assert learnt.missing(8, 32) == pytest.approx(truth.missing(8, 32), rel=0.08)


@settings(deadline=None)
@given(prices=st.tuples(*[st.floats(0.5, 4.0)] * 3), scale=st.floats(1e-6, 1e3))
def test_prices_are_found_from_times(prices: tuple[float, ...], scale: float) -> None:
    times = Times((1.0, 1.0, 1.0))
    grid = [(1.0, float(a), float(b)) for a, b in product(range(1, 5), range(1, 5))]
    for _ in range(12):
        for row in grid:
            seconds = scale * sum(price * x for price, x in zip(prices, row, strict=True))
            times.observe(row, row, seconds)
    far = (1.0, 6.0, 6.0)
    truth = scale * sum(price * x for price, x in zip(prices, far, strict=True))
    assert times.modelled(far) == pytest.approx(truth, rel=0.25)
    assert all(price >= 0 for price in times.prices)


def test_a_slower_machine_is_slower_everywhere() -> None:
    times = Times((1.0, 1.0))
    for _ in range(10):
        times.observe("a", (1.0, 1.0), 1.0)
        times.observe("b", (1.0, 4.0), 2.0)
    before = times.predict("b", (1.0, 4.0))
    for _ in range(60):
        times.observe("a", (1.0, 1.0), 1.4)
    assert times.predict("a", (1.0, 1.0)) == pytest.approx(1.4, rel=0.05)
    assert times.predict("b", (1.0, 4.0)) > 1.12 * before


def test_an_outlier_moves_little() -> None:
    times = Times((1.0,))
    for _ in range(20):
        times.observe("a", (1.0,), 1.0)
    times.observe("a", (1.0,), 1000.0)
    assert times.predict("a", (1.0,)) < 1.1


@given(st.lists(st.lists(st.floats(0.0, 0.99), max_size=3), min_size=1, max_size=3))
def test_the_best_option_is_no_worse_than_plain_and_near_the_best_of_all(
    rates: list[list[float]],
) -> None:
    chains = []
    for own in rates:
        chain, survival = [], 1.0
        for rate in own:
            survival *= rate
            chain.append(survival)
        chains.append(chain)

    def seconds(depths: tuple[int, ...]) -> float:
        return 1.0 + 0.3 * sum(depths) ** 0.8 + 0.2 * max(depths)

    found = best_option(chains, seconds)
    assert found.goodput >= len(chains) / 1.0 - 1e-9

    def goodput(depths: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(c[:d]) for c, d in zip(chains, depths, strict=True))
        return tokens / seconds(depths)

    every = product(*(range(len(chain) + 1) for chain in chains))
    assert found.goodput >= 0.93 * max(map(goodput, every))


def test_rates_start_low_hope_is_high_and_both_meet() -> None:
    rates = PositionRates(3)
    assert rates.rates(1)[0] < 0.5 < rates.rates(1, optimism=2.0)[0]
    for step in range(2, 300):
        rates.observe(step, 2, 2, 2, 2 if step % 2 else 1)
    first, second, third = rates.rates(300)
    assert first == pytest.approx(0.99, abs=0.02)
    assert second == pytest.approx(0.5, abs=0.12)
    assert third == pytest.approx(second, abs=0.1)  # by its likeness to the one before
    assert rates.rates(300, optimism=2.0)[1] < 0.8


def test_tokens_that_are_left_out_count_for_planning_and_not_for_judging() -> None:
    rates = PositionRates(1)
    for step in range(1, 200):
        rates.observe(step, 1, 1, step % 2, step % 2)
    assert rates.rates(200)[0] == pytest.approx(0.5, abs=0.1)
    assert rates.verified_rates()[0] > 0.9
    assert rates.effort()[1][0] == pytest.approx(0.5, abs=0.1)


def test_confidence_is_calibrated() -> None:
    calibration = Calibration()
    for trial in range(400):
        calibration.observe(0.95, trial % 2 == 0)
    often, never = calibration.probabilities([0.95, 0.3], [0.9, 0.3])
    assert often == pytest.approx(0.5, abs=0.05)
    assert never == pytest.approx(0.3)


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.5, 6.0), st.integers(1, 8)), min_size=1, max_size=200
    )
)
def test_no_more_is_lost_in_any_stretch_than_the_account_allows(
    steps: list[tuple[bool, float, int]],
) -> None:
    """Plain steps take 1; others what they like, and bring some tokens of a second each."""
    account, lost, most = Account(), [0.0], [0.0]
    for looking, seconds, tokens in steps:
        if looking and account.affords(seconds - 1.0):
            account.settle(seconds, tokens, 1.0)
            lost.append(lost[-1] + seconds - tokens)
        else:
            seconds = 1.0
            account.earn(seconds, 1.0)
            lost.append(lost[-1])
        most.append(most[-1] + SHARE * seconds)
        assert account.room >= -1e-9
    assert all(lose <= share + UNSPENT + 1e-9 for lose, share in zip(lost, most, strict=True))
    for start in range(len(lost)):
        for end in range(start, len(lost)):
            allowed = most[end] - most[start] + CREDIT
            assert lost[end] - lost[start] <= allowed + 1e-9


def test_trials_are_paid_from_a_share_of_the_time() -> None:
    account = Account()
    assert not account.affords(0.01)
    assert not account.affords_trial(0.01)
    for _ in range(100):
        account.earn(1.0, 1.0)
        assert account.room == UNSPENT  # from the beginning, and no more
    assert not account.affords_trial(0.6)
    for _ in range(100):
        account.earn(1.0, 1.0)
    assert account.affords_trial(0.99)
    account.settle(3.0, 2.2, 1.0)
    account.tried(0.8)
    assert account.room == pytest.approx(UNSPENT - 0.8 + 3 * SHARE)
    assert not account.affords_trial(0.3)
    for _ in range(1000):
        account.earn(1.0, 1.0)
    assert account.room == UNSPENT


def test_what_the_text_speaks_for_may_lose_more_and_then_waits_for_its_share() -> None:
    account, drafts = Account(), 0
    account.earn(1.0, 1.0)
    for _ in range(1000):
        if account.affords(1.0, TRUST):
            account.settle(2.0, 1.0, 1.0)
            drafts += 1
        else:
            account.earn(1.0, 1.0)
    assert drafts == pytest.approx(UNSPENT + TRUST + 1000 * SHARE, abs=1)
    assert not account.affords(1.0)


def test_gains_are_measured_and_may_be_lost_again_in_part() -> None:
    account = Account()
    for _ in range(100):
        account.settle(1.0, 1.3, 1.0)
    assert account.gain == pytest.approx(1.3)
    assert account.room == CREDIT
    assert not account.affords_trial(1.5)  # whatever was gained


def test_looking_goes_on_while_it_pays_and_is_rarer_each_time_where_it_does_not() -> None:
    looking, longest = Looking(), 12
    assert looking.rests(1) == FIRST
    looking.plainly(1.0, 0, 0.0)
    rests = list[int]()
    for _ in range(600):
        looking.missed()
        rests.append(looking.rests(1))
        looking.plainly(1.0, 1, 0.0601)
    assert rests[:16] == [0] * 16
    first = next(index for index, rest in enumerate(rests) if rest)
    assert rests[first : first + 3] == [1, 3, 7]
    assert rests[-1] == longest == int(0.0601 / LOOKED)
    looking.found(-0.5)  # in vain
    assert looking.rests(1) == longest
    for _ in range(3):
        looking.found(4.0)
    looking.missed()
    assert looking.rests(1) == 0


def test_plain_steps_are_measured_first_for_every_batch_and_again_where_there_are_none() -> None:
    looking = Looking()
    assert [looking.rests(batch) for batch in (1, 1, 4, 1, 4)] == [FIRST, 0, FIRST, 0, 0]
    for _ in range(EVERY):
        assert looking.rests(4) == 0
        looking.found(1.0)
    assert [looking.rests(4) for _ in range(2)] == [BURST, 0]
    for _ in range(EVERY - 1):
        looking.found(1.0)
    looking.plainly(1.0, 1, 0.0)
    looking.found(1.0)
    assert looking.rests(4) == 0


def test_the_first_rows_of_a_verification_cost_more_than_others() -> None:
    """As many as it takes to be worth it are drafted, or none."""
    costs = StepCosts(ExpertSizes(100, 10, 100), (1.0, 0.0, 0.01, 0.0), {})
    for _ in range(40):
        for drafted in range(7):
            seconds = 1.0 + 0.5 * (drafted > 0) + 0.1 * drafted
            trial = Trial(cast(RunningSequence, object()), None, drafted, 0)
            costs.observe(None, Round([trial], 1 + drafted, (), 0.0, seconds, 0, True), None)
    assert costs.row(1) == pytest.approx((0.5 + 6 * 0.1) / 6, rel=0.1)
    assert costs.verify(1, 2) - costs.verify(1, 1) == pytest.approx(0.6, rel=0.1)


def test_a_report_counts_by_mode_and_position() -> None:
    report, nobody = Report(), cast(RunningSequence, object())
    trials = [Trial(nobody, MODE, 3, 2), Trial(nobody, MODE, 1, 1), Trial(nobody, None, 0, 0)]
    report.observe(Round(trials, 7, (2, 1, 1), 0.1, 0.2, 1000, True))
    report.plainly(3, resting=True)
    report.plainly(1, resting=False)
    figures = report.figures()
    assert figures["tokens"] == 3 + 2 + 1 + 3 + 1
    assert (figures["steps"], figures["rested_steps"]) == (3, 1)
    assert figures["tokens_per_verification"] == pytest.approx(10 / 7)
    assert figures["depths"] == {"0": 5, "1": 1, "3": 1}
    mode = figures["modes"][MODE.name]
    assert mode["acceptance"] == pytest.approx(3 / 4)
    assert [p["acceptance"] for p in mode["by_position"]] == [1.0, 1.0, 0.0]
    assert mode["draft_bytes"] == 1000
    report.reset()
    assert report.figures()["tokens"] == 0
