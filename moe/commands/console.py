"""Where the tables of subcommands go."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 1000
"""Columns of a file or pipe: a table takes as many as it needs, and no figure of it is cut off."""


def stdout_console() -> Console:
    """As wide as the terminal, or as ``COLUMNS`` says."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDE)
