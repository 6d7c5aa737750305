"""Times of steps are predicted from those measured: averages of plain ones, lines of others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.speculate.step_times import StepTimes


def measured(batch: int, plain: float, start: float, slope: float, steps: int = 300) -> StepTimes:
    """Steps of a machine without noise; drafts have 1 to 6 tokens a sequence."""
    times = StepTimes()
    times.add_plain(batch, plain, 8)
    for step in range(steps):
        x = 1 + step % 6
        times.add(batch, batch * (1 + x), plain * (1 + start + slope * x))
        if step % 8 == 0:
            times.add_plain(batch, plain, 4)
    return times


@settings(deadline=None)
@given(
    batch=st.integers(1, 16),
    plain=st.floats(1e-4, 10.0),
    start=st.floats(0.0, 0.5),
    slope=st.floats(0.1, 0.5),
)
def test_a_line_is_found_from_times(batch: int, plain: float, start: float, slope: float) -> None:
    times = measured(batch, plain, start, slope)
    assert times.plain(batch) == pytest.approx(plain)
    for x in (1, 3, 6):
        truth = plain * (1 + start + slope * x)
        assert times.verify(batch, batch * (1 + x)) == pytest.approx(truth, rel=0.2)
    assert times.figures()["prediction_error"] < 0.2


def test_nothing_is_known_before_plain_steps_have_been_measured() -> None:
    times = StepTimes()
    assert times.plain(2) == 0.0
    assert times.figures()["target_efficiency"] == {"predicted": None, "measured": None}
    assert times.figures()["prediction_error"] is None
    times.add_plain(2, 1.0, 4)
    assert times.plain(2) == 1.0 == times.verify(2, 2)
    assert times.plain(1) == 0.0


def test_another_batch_size_begins_with_the_line_that_is_known() -> None:
    times = measured(1, 1.0, 0.3, 0.1)
    times.add_plain(4, 2.0, 8)
    assert times.line(4) == times.line(1)


def test_on_a_slower_machine_every_step_is_slower() -> None:
    times = measured(1, 1.0, 0.0, 0.2)
    before = times.verify(1, 4)
    times.add_plain(1, 1.4, 64)
    assert times.plain(1) == pytest.approx(1.4)
    assert times.verify(1, 4) == pytest.approx(1.4 * before)


def test_an_outlier_moves_little() -> None:
    times = measured(1, 1.0, 0.0, 0.2)
    before = times.verify(1, 4)
    times.add(1, 4, 1000.0)
    assert times.verify(1, 4) < 1.1 * before
    times.add_plain(1, 2.0, 1)
    assert times.plain(1) < 1.1


def test_target_efficiency_is_a_plain_step_over_one_that_verifies() -> None:
    efficiency = measured(2, 1.0, 0.0, 0.25).figures()["target_efficiency"]
    truth = 1 / (1 + 0.25 * 3.5)
    assert efficiency["measured"] == pytest.approx(truth, rel=0.1)
    assert efficiency["predicted"] == pytest.approx(truth, rel=0.1)
