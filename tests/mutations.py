"""Remove guards one after the other, and see that a test fails without each.

    python -m tests.mutations [WORD ...]    those whose promise, fault or file has one of the words

Guards are those of the modules that the table of promises in SECURITY.md names, found by program
(`tests.mutants`) and tried with the tests that its row names; and those of ``mutations.yaml``, each
with a change of its own. Works on a copy of the tree. What a mutant came to is kept in
``build/mutations.json`` as long as neither the module nor the tests change, so that a run which was
stopped goes on. A mutant that no test notices is a hole in the tests: exit code 1. It takes an hour
or two, so the suite does not run it; it is for those who change a guard.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.mutants import digest_of, mutants_of

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.yaml")
EQUAL = Path(__file__).with_name("mutations_equal.yaml")
RESULTS = ROOT / "build" / "mutations.json"
_SECONDS = 300
_BEFORE = ("torch", "transformers", "fastapi", "uvicorn", "httpx", "hypothesis", "pytest")
"""Imported once, before any test: half of the time of a short one."""


@dataclass(frozen=True)
class Promise:
    """A row of SECURITY.md's table.

    Attributes:
        name: the word that selects it.
        guards: modules, each whole or one function or class of it (``file::name``).
        tests: files, or tests in them.
        by_hand: its mutants in ``mutations.yaml``.
    """

    name: str
    guards: tuple[str, ...]
    tests: tuple[str, ...]
    by_hand: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that should notice."""

    name: str
    file: str
    source: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        files = sorted({test.partition("::")[0] for test in self.tests if test.endswith(".py")})
        return digest_of(self.source, *self.tests, *map(_read, files))


@cache
def _read(file: str) -> str:
    return (ROOT / file).read_text()


def promises() -> list[Promise]:
    """The table of promises."""
    text = (ROOT / "SECURITY.md").read_text()
    table = text.partition("## What holds each promise")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return [
        Promise(
            re.findall(r"`([^`]+)`", cells[0])[0],
            tuple(re.findall(r"`([^`]+)`", cells[2])),
            tuple(re.findall(r"`([^`]+)`", cells[3])),
            tuple(re.findall(r"`([^`]+)`", cells[4])),
        )
        for cells in rows
    ]


def trials() -> Iterator[Trial]:
    """All of them: by program, then by hand."""
    for promise in promises():
        for guard in promise.guards:
            file, _, within = guard.partition("::")
            seen: dict[str, int] = {}
            for mutant in mutants_of(_read(file), within):
                name = mutant.name(file)
                seen[name] = seen.get(name, 0) + 1
                number = f" ({seen[name]})" if seen[name] > 1 else ""
                yield Trial(f"{promise.name}: {name}{number}", file, mutant.source, promise.tests)
    rows = {name: f"{promise.name}: " for promise in promises() for name in promise.by_hand}
    for own in yaml.safe_load(LIST.read_text()):
        source = _read(own["file"])
        if source.count(own["guard"]) != 1:
            raise SystemExit(f"STALE {own['fault']}: the guard is not once in {own['file']}")
        changed = source.replace(own["guard"], own["without"])
        name = rows.get(own["fault"], "") + own["fault"]
        yield Trial(name, own["file"], changed, tuple(own["test"]))


def main(words: list[str]) -> int:
    equal: dict[str, str] = yaml.safe_load(EQUAL.read_text()) or {}
    chosen = [
        trial
        for trial in trials()
        if trial.name not in equal and (not words or any(word in trial.name for word in words))
    ]
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.unfinished")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for name in _BEFORE:
            importlib.import_module(name)
        for trial in chosen:
            said = known.get(trial.name, {})
            if said.get("digest") != trial.digest:
                begun = time.monotonic()
                (copy / trial.file).write_text(trial.source)
                became = _what_becomes_of(copy, trial.tests)
                (copy / trial.file).write_text(_read(trial.file))
                said = {"digest": trial.digest, "became": became}
                said["seconds"] = round(time.monotonic() - begun, 1)
                known[trial.name] = said
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(known, indent=1))
            print(f"{said['became']:<8} {trial.name}", flush=True)
            survived += [trial.name] if said["became"] == "SURVIVED" else []
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return int(bool(survived))


def _what_becomes_of(tree: Path, tests: tuple[str, ...]) -> str:
    """Whether a test notices. One that hangs does, or the machine is busy: look which."""
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            _run(tree, tests)
        finally:
            os._exit(3)
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            _end(child)
            # Killed by a signal counts; others are no such test, or one that could not begin
            return "killed" if code in (1, 2) or code < 0 else "SURVIVED"
        time.sleep(0.05)
    _end(child)
    os.waitpid(child, 0)
    return "hung"


def _end(child: int) -> None:
    """End a child and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _run(tree: Path, tests: tuple[str, ...]) -> None:
    """In a child: the tests of the copy, whose modules nothing has imported yet."""
    import pytest

    os.chdir(tree)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    os._exit(int(code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
