"""Percentiles, goodput and throughput of answers whose times are written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load_generator import Result
from benchmarks.serving_figures import Target, gaps, is_good, percentiles, summary, ttft

TARGET = Target(ttft_s=0.5, tbt_s=0.1)


def answer(sent: float, *token_times: float, **fields: object) -> Result:
    ended = token_times[-1] if token_times else sent
    counts = {"prompt_tokens": 10, "new_tokens": len(token_times), "ended": ended}
    return Result(sent, list(token_times), **{**counts, **fields})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_numpys(values: list[float]) -> None:
    expected = np.percentile(values, (50, 90, 99))
    assert list(percentiles(values).values()) == pytest.approx(expected.tolist())


def test_percentiles_between_two_values_are_interpolated() -> None:
    assert percentiles([0.0, 1.0]) == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99})


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_times_of_one_answer() -> None:
    one = answer(1.0, 1.25, 1.5, 2.5)
    assert ttft(one) == 0.25
    assert gaps(one) == [0.25, 1.0]


@pytest.mark.parametrize(
    ("result", "good"),
    [
        (answer(0, 0.5, 0.6, 0.7), True),
        (answer(0, 0.5), True),
        (answer(0, 0.51, 0.6), False),
        (answer(0, 0.1, 0.3), False),
        (answer(0, 0.1, 0.15, error="status 500"), False),
        (answer(0), False),
    ],
    ids=["on time", "one token", "late first token", "late token", "failed", "no token"],
)
def test_good_answers_are_complete_and_in_time(result: Result, good: bool) -> None:
    assert is_good(result, TARGET) == good


@pytest.mark.parametrize(("late", "good"), [(1, True), (2, False)])
def test_one_token_in_a_hundred_may_be_late(late: int, good: bool) -> None:
    steps = [0.2] * late + [0.05] * (150 - late)
    assert is_good(answer(0, *np.cumsum([0.1, *steps])), TARGET) == good


def test_a_run_lasts_from_the_first_request_to_the_last_answer() -> None:
    figures = summary(
        [answer(10, 10.25, 10.5, 11), answer(12, 12.25, 14), answer(13, 13.25, error="broken")],
        TARGET,
    )
    assert figures["seconds"] == 4
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert (figures["prompt_tokens"], figures["new_tokens"]) == (20, 5)
    assert figures["requests_per_s"] == 2 / 4
    assert figures["new_tokens_per_s"] == 5 / 4
    assert figures["all_tokens_per_s"] == 25 / 4
    assert figures["goodput_per_s"] == 0
    assert figures["ttft_s"]["p50"] == 0.25
    assert figures["tbt_s"] == percentiles([0.25, 0.5, 1.75])
    assert figures["e2e_s"] == percentiles([1.0, 2.0])


def test_a_run_in_which_everything_failed() -> None:
    figures = summary([answer(0, error="refused", ended=1.0)], TARGET)
    assert (figures["failed"], figures["requests_per_s"], figures["goodput_per_s"]) == (1, 0, 0)
    assert figures["ttft_s"]["p99"] is None
