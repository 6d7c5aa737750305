"""Output of subcommands: a console for tables, and a progress bar on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WIDE = 1000
"""Columns of a file or pipe: wide enough that no table is cut off."""
OnStep = Callable[[str, int, int], object]
"""Called with the task, the steps done and all steps."""


def stdout_console() -> Console:
    """A console as wide as the terminal or ``COLUMNS``; `WIDE` for a file or pipe. What it prints
    is no markup: settings have brackets."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDE, markup=False)


@contextmanager
def step_bar() -> Iterator[OnStep]:
    """Show a progress bar; gives the function that moves it."""
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
