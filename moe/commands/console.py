"""What subcommands print on: a console for tables, and a bar on stderr for work in steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WIDE = 1000
"""Columns of a file or pipe: a table takes as many as it needs, and no figure of it is cut off."""
OnStep = Callable[[str, int, int], object]
"""Hears what is being done, and how many of how many steps are."""


def stdout_console() -> Console:
    """As wide as the terminal, or as ``COLUMNS`` says."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDE)


@contextmanager
def step_bar() -> Iterator[OnStep]:
    """What moves the bar."""
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
