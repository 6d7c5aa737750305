"""Rebalancing: forecasts of drifting loads, moves only where they pay, never for another group."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement import Placement, first_placement, linear, pack, repack
from experts.placement.background import Background, RepackJob
from experts.placement.evenness import fee, heaviest
from experts.placement.packing import Repacked
from experts.placement.placement import Floats
from experts.placement.rebalance import LEAST_STEPS, Rebalancer, StepRate, TokenLoads


class Inline:
    """A repacker that answers at once, or never, if it is told to."""

    def __init__(self, *, answers: bool = True) -> None:
        self.jobs: list[RepackJob] = []
        self.busy, self.answers, self.closed = False, answers, False

    def submit(self, job: RepackJob) -> None:
        assert not self.busy
        self.jobs.append(job)
        self.busy = True

    def result(self) -> Repacked | None:
        if not (self.busy and self.answers):
            return None
        self.busy = False
        job = self.jobs[-1]
        return repack(job.costs_SE, job.current, job.price_E)

    def close(self) -> None:
        self.closed = True


def rebalancer(repacker: Inline, placement: Placement, price_s: float = 0.0) -> Rebalancer:
    read_E: Floats = np.full(placement.num_experts, price_s)
    return Rebalancer([placement], seconds_LE=[read_E], horizon_s=60.0, repacker=repacker)


SKEWED = np.array([40, 40, 40, 40, 1, 1, 1, 1])


@given(st.integers(0, 2**32), st.floats(0, 1))
@settings(max_examples=20)
def test_a_repacking_lowers_the_load_by_more_than_its_moves_cost(seed: int, price: float) -> None:
    rng = np.random.default_rng(seed)
    costs_SE = rng.poisson(30 * (rng.permutation(12) + 1.0) ** -1, size=(6, 12)).astype(np.float64)
    current = first_placement("packed", 12, 3, 0.25)
    price_E = rng.uniform(0, 20 * price, size=12)
    new = repack(costs_SE, current, price_E).placement
    saved = heaviest(costs_SE, current.copies_ER) - heaviest(costs_SE, new.copies_ER)
    moved = fee(new.copies_ER, current.copies_ER, price_E)
    assert new == current or saved > moved
    assert repack(costs_SE, current, price_E + 1e9) == Repacked(current, sure=False)


def test_free_moves_come_near_to_packing_anew() -> None:
    rng = np.random.default_rng(1)
    drawn_SE = rng.poisson(30 * (rng.permutation(32) + 1.0) ** -0.7, size=(16, 32))
    costs_SE = drawn_SE.astype(np.float64)
    new = repack(costs_SE, first_placement("packed", 32, 4, 0.25), np.zeros(32)).placement
    anew = pack(costs_SE, 40, 4)
    assert heaviest(costs_SE, new.copies_ER) <= 1.02 * heaviest(costs_SE, anew.copies_ER)


def test_seconds_a_token_are_the_slope_where_steps_differ() -> None:
    rate = StepRate()
    for tokens in (10, 200, 40, 120) * 8:
        rate.observe(tokens, 0.5 + 0.01 * tokens)
    assert rate.seconds_a_token == pytest.approx(0.01)
    alike = StepRate()
    for _ in range(8):
        alike.observe(100, 2.0)
    assert alike.seconds_a_token == pytest.approx(0.01)
    assert alike.seconds_a_step == pytest.approx(2.0)


def test_uneven_ranks_are_levelled_under_one_epoch_and_then_left_alone() -> None:
    rebalance = rebalancer(Inline(), linear(8, 8, 2))
    moves = []
    for _ in range(4 * LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        moves.append(rebalance.poll())
    made = [one for one in moves if one is not None]
    assert [one.epoch for one in made] == [1]
    loads_R = SKEWED @ made[0].placements[0].copies_ER
    assert loads_R.tolist() == [82, 82]
    assert moves[: LEAST_STEPS - 1] == [None] * (LEAST_STEPS - 1)


def test_loads_that_differ_by_chance_alone_are_known_once_copies_are_well_spread() -> None:
    """Every placement can be fitted to the steps that it is made from."""
    rng, sure = np.random.default_rng(0), 0

    def by_chance() -> Floats:
        return rng.multinomial(128, np.full(16, 1 / 16), size=24).astype(np.float64)

    for _ in range(4):
        spread = first_placement("packed", 16, 4, 0.25)
        while not (found := repack(by_chance(), spread, np.zeros(16))).sure:
            spread = found.placement
        sure += sum(repack(by_chance(), found.placement, np.zeros(16)).sure for _ in range(5))
    assert sure <= 4


def test_questions_that_bring_nothing_become_rare_until_one_brings_something() -> None:
    """A question takes a second, and so does a step; at most a share of 1 / 17 is asked."""
    repacker, step = Inline(), 0
    rebalance = Rebalancer(
        [linear(8, 8, 2)],
        seconds_LE=[np.zeros(8)],
        horizon_s=60.0,
        repacker=repacker,
        clock=lambda: float(step),
    )
    level, asked, moves = np.full((1, 8), 20), [], []
    for step in range(400):
        rebalance.observe(SKEWED[None] if step >= 200 else level, 1.0)
        moves.append(rebalance.poll())
        asked.append(len(repacker.jobs))
    assert asked[40] >= 5
    assert 4 <= asked[199] - asked[99] <= 7
    assert not any(moves[:200])
    assert any(moves[200:])


def test_a_move_that_takes_longer_than_it_saves_is_not_made() -> None:
    rebalance = rebalancer(Inline(), linear(8, 8, 2), price_s=60.0)
    for _ in range(4 * LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        assert rebalance.poll() is None


def test_an_answer_for_a_group_that_is_no_more_is_dropped() -> None:
    repacker = Inline(answers=False)
    rebalance = rebalancer(repacker, linear(8, 8, 2))
    for _ in range(LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        rebalance.poll()
    assert repacker.busy
    rebalance.reset([linear(8, 8, 1)])
    repacker.answers = True
    assert rebalance.poll() is None
    for _ in range(4 * LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        assert rebalance.poll() is None  # one rank has nothing to level
    rebalance.close()
    assert repacker.closed


def test_layers_that_nobody_visits_are_never_asked_about() -> None:
    repacker = Inline()
    rebalance = Rebalancer(
        [linear(8, 8, 2)] * 3, seconds_LE=[np.zeros(8)] * 3, horizon_s=60.0, repacker=repacker
    )
    layers = set()
    for _ in range(4 * LEAST_STEPS):
        rebalance.observe(np.stack([SKEWED, 0 * SKEWED, SKEWED]), 1.0)
        moves = rebalance.poll()
        layers |= set(moves.placements) if moves else set()
    assert layers == {0, 2}


@pytest.mark.parametrize("price_s", [0.0, 1e-3])
def test_tokens_that_are_known_count_in_what_is_repacked(price_s: float) -> None:
    """All of it where moves are free, and only the next steps are looked at."""
    repacker, asked = Inline(), []

    def foreseen(layer: int, ahead: float) -> TokenLoads:
        asked.append((layer, ahead))
        coming_E = np.array([0.0] * 7 + [SKEWED.sum()])
        return TokenLoads(np.tile(SKEWED * 1.0, (3, 1)), np.tile(coming_E, (30, 1)))

    rebalance = Rebalancer(
        [linear(8, 8, 2)],
        seconds_LE=[np.full(8, price_s)],
        horizon_s=60.0,
        token_loads=foreseen,
        repacker=repacker,
    )
    for _ in range(LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        rebalance.poll()
    assert asked == [(0, LEAST_STEPS if price_s == 0 else 60.0)]
    seventh_S = repacker.jobs[0].costs_SE[:, 7] > 2 * SKEWED[7]
    assert seventh_S.tolist() == [price_s == 0 or step < LEAST_STEPS / 2 for step in range(8)]


def test_experts_that_are_slow_to_read_and_often_absent_are_kept_apart() -> None:
    """As many tokens each, so only reading tells them apart: four of 8 bits, four of 2."""
    size_E = np.array([4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    for missing, moved in ((0.0, False), (0.5, True)):
        repacker = Inline()
        rebalance = Rebalancer(
            [linear(8, 8, 2)],
            seconds_LE=[size_E / 1000],
            horizon_s=60.0,
            missing=lambda layer, share=missing: share,  # type: ignore[misc]
            repacker=repacker,
        )
        moves = None
        for _ in range(LEAST_STEPS + 1):
            rebalance.observe(np.full((1, 8), 4), 0.1)
            moves = rebalance.poll() or moves
        assert (moves is not None) == moved
        if moves is not None:
            assert (size_E @ (moves.placements[0].copies_ER > 0) == size_E.sum() / 2).all()


def wait_for(background: Background) -> Repacked:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = background.result()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_the_process_answers_as_the_function_and_ends_with_whoever_holds_it() -> None:
    costs_SE, current = np.tile(SKEWED * 1.0, (4, 1)), linear(8, 8, 2)
    job = RepackJob(costs_SE, current, np.full(8, 0.5))
    background = Background()
    background.submit(job)
    assert background.busy
    assert wait_for(background) == repack(costs_SE, current, job.price_E) != (current, False)
    process = background._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does it when the holder is killed
    assert process.wait(60) == 0
    background.close()


def test_a_process_that_was_killed_is_an_error() -> None:
    job = RepackJob(np.ones((1, 8)), linear(8, 8, 2), np.zeros(8))
    background = Background()
    background.submit(job)
    wait_for(background)
    assert background._process is not None
    background._process.kill()
    background._process.wait()
    background.submit(job)
    with pytest.raises(OSError, match=r"Broken pipe|ended with status -9"):
        wait_for(background)
    background.close()


def test_rebalancing_ends_with_its_process_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lost(Inline):
        def result(self) -> Repacked | None:
            if self.busy:
                self.busy = False
                raise OSError("it ended")
            return None

    rebalance = rebalancer(Lost(), linear(8, 8, 2))
    for _ in range(4 * LEAST_STEPS):
        rebalance.observe(SKEWED[None], 1.0)
        assert rebalance.poll() is None
    assert [record.getMessage() for record in caplog.records] == [
        "experts stay where they are from now on: it ended"
    ]
