"""Remove guards one after the other, and see that a test fails without each.

    python -m tests.mutations [WORD ...]    those whose promise, fault or file has one of the words

Guards are those of the modules that the table of promises in SECURITY.md names, found by program
(`tests.mutants`) and tried with the tests that its row names; and those of ``mutations.yaml``, each
with a change of its own. Works on a copy of the tree. What a mutant came to is kept in
``build/mutations.json`` as long as neither the module nor the tests change, so that a run which was
stopped goes on. A mutant that no test notices is a hole in the tests: exit code 1. It takes half an
hour, so the suite does not run it; it is for those who change a guard.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tests.mutants import mutants_of
from tests.tries import Trial, try_all

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.yaml")
EQUAL = Path(__file__).with_name("mutations_equal.yaml")
LIMITS = ("tests/test_faults.py", "-k", "limits")
"""The numbers of limits are pinned; that a limit holds, the tests of its ``raise`` show."""
RESULTS = ROOT / "build" / "mutations.json"
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
                name = f"{promise.name}: {name}{number}"
                if mutant.kind == "limit":
                    yield Trial(name, file, mutant.source, LIMITS)
                else:
                    yield Trial(name, file, mutant.source, promise.tests, mutant.line)
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
    known = _known()
    digests = {trial.name: trial.digest(ROOT) for trial in chosen}
    left = [t for t in chosen if known.get(t.name, {}).get("digest") != digests[t.name]]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.unfinished")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for name in _BEFORE:
            importlib.import_module(name)
        for _, same in groupby(sorted(left, key=_tests_of), key=_tests_of):
            try:
                for trial, became, by, seconds in try_all(tree, list(same)):
                    print(f"{became:<8} {trial.name}", flush=True)
                    known = _known()  # again: others may try other rows
                    known[trial.name] = {
                        "digest": digests[trial.name],
                        **{"became": became, "by": by, "seconds": seconds},
                    }
                    RESULTS.parent.mkdir(exist_ok=True)
                    RESULTS.write_text(json.dumps(known, indent=1))
            except RuntimeError as error:
                print(f"BROKEN   {error}", flush=True)
    known = _known()
    fates = {trial.name: known.get(trial.name, {}).get("became") for trial in chosen}
    holes = [name for name, what in fates.items() if what != "killed"]
    print("\n".join(f"NOT KILLED {name}" for name in holes))
    print(f"{len(chosen) - len(holes)} of {len(chosen)} killed")
    return int(bool(holes))


def _known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def _tests_of(trial: Trial) -> tuple[str, ...]:
    return trial.tests


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
