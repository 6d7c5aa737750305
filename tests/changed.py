"""Run the deep tests of what changed, the most valuable ones first, in bounded time.

    python -m tests.changed --minutes 20 [--since COMMIT] [--jobs 2] [--dry-run] [-- PYTEST...]

A room stands on the rooms that its modules import (tests/floors.py). Tests that changed come
first, then those of rooms that changed, then those of rooms one step above, and so on; of equal
ones the cheapest. What does not fit the minutes, by tests/cpu_budget.json, is left out and named.
Should this machine be slower than its calibration says, tests that have not begun in time are
skipped.

Without COMMIT, changes are those since the commit that `base` finds.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import floors
from tests.cpu_budget import DEFAULTS, read_budget, scale
from tests.cpu_seconds import DEEP_TIER
from tests.floors import ROOT, room_of

HOURS = 12
"""Of a fresh clone nobody knows what was pushed last: commits of so many hours count as new."""
EVERYTHING = {"pyproject.toml", "requirements.lock", "tests/conftest.py", "tests/amounts.py"}
"""Files whose change concerns all rooms."""
WITHOUT_BASE = ("decode", "engine", "network", "kernels")
"""Rooms whose deep tests run where no base is known: most faults were there."""
_SHARE = 0.85  # of the processors' time that tests take: the last file has one of them alone
_FAR = 100  # steps: above all rooms


def git(*arguments: str) -> str:
    """Return what git prints; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> tuple[str, str]:
    """Return the commit before those that were pushed, and how it was found; both may be empty.

    It is ``$BASE``, or where this branch left its upstream, or, as a clone has no branch of its
    own, the newest commit that is `HOURS` older than the last one.
    """
    if named := os.environ.get("BASE"):
        return git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}"), "$BASE"
    head = git("rev-parse", "HEAD")
    left = git("merge-base", "HEAD", "@{upstream}")
    if left and left != head:
        return left, "where this branch left its upstream"
    if until := git("log", "-1", "--format=%ct"):
        older = f"--before={int(until) - HOURS * 3600}"
        found = git("rev-list", "--first-parent", "-1", older, "HEAD")
        return found, f"the newest commit {HOURS} hours older than the last"
    return "", ""


def steps_above(changed: Iterable[str]) -> dict[str, int]:
    """Return room -> how many imports it stands above the nearest room that changed."""
    known = floors.modules()
    above: dict[str, set[str]] = {}
    for module in known:
        for target in floors.imports(module, known):
            above.setdefault(room_of(target), set()).add(room_of(module))
    steps = dict.fromkeys(changed, 0)
    for room in (reached := list(steps)):  # grows
        for upper in sorted(above.get(room, ())):
            if upper not in steps:
                steps[upper] = steps[room] + 1
                reached.append(upper)
    return steps


@cache
def rooms_of_test(file: str) -> frozenset[str]:
    """Return the rooms that a test file is about: that of its folder or name, or its imports'."""
    named = Path(file).stem.removeprefix("test_")
    if file.startswith("tests/moe/") and named in floors.FLOORS:
        return frozenset({named})
    for part in reversed(Path(file).parts[1:-1]):
        if part in floors.FLOORS or (part in floors.ROOMS and part != "moe"):
            return frozenset({part})
        if part in ("benchmarks", "examples", "lab"):
            return frozenset({part})
    known = floors.modules()
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name in known}
    return frozenset(room_of(name) for name in names)


def changed_rooms(files: Iterable[str]) -> set[str]:
    """Return the rooms in which one of these files is, and all of them for `EVERYTHING`."""
    everything = {*floors.FLOORS, *floors.ROOMS}
    rooms: set[str] = set()
    for file in files:
        top, *rest = Path(file).parts
        if file in EVERYTHING:
            return everything
        if top in floors.ROOMS:
            inside = ".".join((top, *rest)).removesuffix(".py")
            rooms.add(room_of(inside))
        elif top in ("benchmarks", "examples", "lab"):
            rooms.add(top)
    return rooms


def deep_files() -> list[str]:
    """Return the test files that have deep tests, or parameters that may be deep."""
    texts = {file: file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = re.compile(r"mark\.deep\b|\bdeep_except\(|TARGET_PARAMS\b")
    return [str(file.relative_to(ROOT)) for file, text in texts.items() if marked.search(text)]


class Chosen(NamedTuple):
    file: str
    seconds: float  # of CPU, here


class Plan(NamedTuple):
    chosen: list[Chosen]
    left_out: list[Chosen]


def plan(files: Iterable[str], deep: dict[str, float], seconds: float) -> Plan:
    """Choose deep tests.

    Args:
        files: that changed, from the root of the repository.
        deep: test file -> CPU seconds of its deep tests here.
        seconds: of CPU that there are.
    """
    files = set(files)
    steps = steps_above(changed_rooms(files))

    def distance(file: str) -> int:
        if file in files:
            return -1
        return min((steps.get(room, _FAR) for room in rooms_of_test(file)), default=_FAR)

    far = {file: distance(file) for file in deep}
    # Tests of benchmarks, examples and the laboratory are about a room only when that changed.
    concerned = sorted((far[file], deep[file], file) for file in deep if far[file] < _FAR)
    result = Plan([], [])
    for _, cost, file in concerned:
        fits = cost <= seconds
        seconds -= cost if fits else 0.0
        (result.chosen if fits else result.left_out).append(Chosen(file, cost))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of wall time, at most")
    parser.add_argument("--since", help="a commit: what changed since then")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    budget = read_budget()
    factor = scale(budget)
    deep = {
        file: factor * budget.get(file, {}).get("deep", DEFAULTS["deep"]) for file in deep_files()
    }
    since, how = (git("rev-parse", options.since), "--since") if options.since else base()
    if since:
        files = set(git("diff", "--name-only", since, "HEAD").splitlines())
        print(f"deep tests of what changed since {since[:8]} ({how}):", len(files), "files")
    else:
        files = {f"moe/{room}/" if room in floors.FLOORS else f"{room}/" for room in WITHOUT_BASE}
        print("deep tests of a fixed set, as no commit is known from before this change:")
    print("  rooms that changed:", ", ".join(sorted(changed_rooms(files))) or "none")
    found = plan(files, deep, options.minutes * 60 * max(1, options.jobs) * _SHARE)
    minutes = sum(own.seconds for own in found.chosen) / 60 / max(1, options.jobs) / _SHARE
    print(
        f"  {len(found.chosen)} of {len(deep)} files, about {minutes:.0f} minutes of at most "
        f"{options.minutes:.0f} (this machine takes {factor:.1f} times the budget's seconds)"
    )
    if found.left_out:
        names = ", ".join(own.file.removeprefix("tests/") for own in found.left_out)
        print(f"  left out, for RUN_ALL=1 and the nightly run: {names}")
    sys.stdout.flush()
    if options.dry_run or not found.chosen:
        return 0
    until = time.time() + 60 * options.minutes
    command = [sys.executable, "-m", "pytest", "-p", "tests.changed", f"--until={until:.0f}"]
    command += ["-m", DEEP_TIER, f"-n{options.jobs}", "--dist=loadfile"]
    command += [
        "--no-loadscope-reorder",
        "--cpu-seconds=build/cpu/deep.json",
        *options.pytest,
        *(own.file for own in found.chosen),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, help="time at which no further test begins")


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until and time.time() > until:
        pytest.skip("its time is up: RUN_ALL=1 runs it")


if __name__ == "__main__":
    sys.exit(main())
