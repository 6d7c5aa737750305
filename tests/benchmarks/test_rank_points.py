"""Launches of the benchmark of several ranks: each once, then again, as far as the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import rank_points
from benchmarks.offload_models import Target
from benchmarks.rank_points import Point, run

TARGET = Target(Path("store"), None, 8, 1)


class Clock:
    """Every launch takes ten seconds; ranks above two fail."""

    def __init__(self) -> None:
        self.now = 0.0
        self.launched: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def measure(self, store: Path, ranks: int, *_: Any) -> dict[str, Any]:
        self.now += 10
        self.launched.append(ranks)
        if ranks > 2:
            raise rank_points.LaunchError("ended")
        return {"tokens_per_s": 100.0 * ranks, "answers": [[5, -1.0]]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rank_points, "time", made)
    monkeypatch.setattr(rank_points, "measure", made.measure)
    return made


def ways() -> list[Point]:
    return [Point(f"{ranks} ranks", ranks, {}, {}, launches=2) for ranks in (1, 2, 3)]


def test_everybody_is_launched_once_before_anybody_is_again(clock: Clock) -> None:
    found = ways()
    run(found, TARGET, 100)
    assert clock.launched == [1, 2, 3, 2, 1]
    assert [len(point.runs) for point in found] == [2, 2, 0]
    assert found[2].error == "ended"


def test_what_would_take_too_long_is_left_out_and_named(clock: Clock) -> None:
    found = ways()
    run(found, TARGET, 25)
    assert clock.launched == [1, 2]
    assert [point.error for point in found] == ["", "", "no time was left"]
    assert found[2].figures(1, []) == {"name": "3 ranks", "ranks": 3, "error": "no time was left"}


def test_answers_are_held_against_those_of_one_rank(clock: Clock) -> None:
    (first, *_) = found = ways()
    run(found[:1], TARGET, 15)
    first.runs[0]["ranks"] = []
    figures = first.figures(1, [[5, -1.25]])
    assert (figures["tokens_alike"], figures["logprob_error"]) == (1.0, 0.25)
    assert figures["tokens_per_s"] == 100.0
