"""What every benchmark shares: fair timing, where it ran, and how it reports.

Contenders take turns within one run, so that a busy neighbour or a changing clock meets all of
them; medians ignore its peaks. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from moe.commands.console import stdout_console

_console = stdout_console()


def environment() -> dict[str, Any]:
    """Date, commit and machine of this run."""
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def take_turns(
    contenders: Mapping[str, Callable[[int], object]], seconds: float, min_rounds: int = 3
) -> dict[str, float]:
    """Median seconds a call of each contender, called in turn for about `seconds` altogether.

    A contender gets the number of the call, a different one each time, to vary its input by.
    Every second round runs backwards, so that nobody always follows the same neighbour. One
    untimed round comes first.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order, call, deadline = list(contenders), 0, float("inf")
    while time.perf_counter() < deadline or len(times[order[0]]) < min_rounds + 1:
        for name in order:
            start = time.perf_counter()
            contenders[name](call)
            times[name].append(time.perf_counter() - start)
            call += 1
        if deadline == float("inf"):
            deadline = time.perf_counter() + seconds
        order.reverse()
    return {name: median(values[1:]) for name, values in times.items()}


def several(kind: Callable[[str], object]) -> dict[str, Any]:
    """Of `add_argument`: one number or several, as ``1 2 4`` or ``1,2,4``."""

    def parts(text: str) -> list[object]:
        return [kind(part) for part in text.split(",")]

    parts.__name__ = getattr(kind, "__name__", "value")  # in messages
    return {"type": parts, "nargs": "+", "action": _Joined}


class _Joined(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None
    ) -> None:
        setattr(namespace, self.dest, [value for part in values for value in part])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table with the first column to the left and numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{x:,.2f}" if isinstance(x, float) else str(x) for x in row))
    _console.print(table)


def print_header(facts: Mapping[str, Any]) -> None:
    """One dim line of facts about the run."""
    _console.print(" | ".join(f"{key} {value}" for key, value in facts.items()), style="dim")


def print_json(result: Mapping[str, Any]) -> None:
    """The machine-readable last line."""
    print(json.dumps(result), flush=True)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "none"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
