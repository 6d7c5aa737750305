"""A time limit that no loop escapes, and that leaves nothing behind."""

from __future__ import annotations

import sys

import pytest

from moe.text.chat import DeadlineError, deadline

LOOP = compile("for _ in iter(int, 1):\n    pass", "<loop>", "exec")
CALLS = compile("for _ in iter(lambda: abs(len([])), 1):\n    pass", "<calls>", "exec")


def run(code: object) -> None:
    exec(code)  # type: ignore[arg-type]  # noqa: S102


@pytest.mark.parametrize("code", [LOOP, CALLS], ids=["lines", "calls"])
def test_an_endless_loop_ends(code: object) -> None:
    before = sys.gettrace()
    with pytest.raises(DeadlineError), deadline(0.05, "<loop>"):
        run(code)
    assert sys.gettrace() is before


def test_what_is_done_in_time_is_not_disturbed() -> None:
    before = sys.gettrace()
    with deadline(60, "<loop>"):
        done = sum(range(1000))
    assert done == 499500
    assert sys.gettrace() is before
