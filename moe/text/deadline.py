"""A time limit for somebody else's Python code, such as a chat template, in this thread.

A thread cannot be killed from outside, and one that is abandoned goes on for ever. A trace function
can raise inside the code itself: it is called at every line of the watched code and at every call
of a function, so no loop escapes it. A single long operation in C does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class DeadlineError(Exception):
    """The time was up."""


@contextmanager
def deadline(seconds: float, file_name: str) -> Iterator[None]:
    """Raise `DeadlineError` in what runs here once the time is up.

    Args:
        seconds: from now.
        file_name: of the code whose lines are watched, as in its code objects; of all other code
            only the calls are, which costs little.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise DeadlineError
        return trace if frame.f_code.co_filename == file_name else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
