"""The CPU seconds that files of tests may take, and the quick tier as a whole.

    python -m tests.cpu_budget MEASURED...           exit code 1 if a file or the tier takes more
    python -m tests.cpu_budget --write MEASURED...   the measured seconds become the budget

`make test` and `make test-deep` write MEASURED (tests/cpu_seconds.py). Budgets are seconds of one
machine, and scale by the time that a fixed piece of work takes here and took there. A file may take
twice its budget, as neighbours on a shared machine cost caches and clock; a new file has a budget,
too. A file that takes more runs again by itself, and the smaller figure counts: the first test that
needs a kernel pays for its compiler. Whoever has a reason for more writes the budget anew, where a
reviewer sees it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.cpu_seconds import DEEP_TIER

BUDGET = Path(__file__).with_name("cpu_budget.json")
QUICK_SECONDS = 1200
"""Of the quick tier, imports included, on the machine of the budget."""
DEFAULTS = {"quick": 6.0, "deep": 15.0}
"""Tier -> CPU seconds of a file that nobody has measured."""
_LEAST = 3.0  # differences of less are noise: who comes first pays for imports
_HEADROOM = 2.0
_AGAIN = (
    8  # files: so many are noise or a change of theirs; more of them are a change of everything
)


def calibration() -> float:
    """Return CPU seconds of fixed work: what tests do, Python most of all. The best of nine."""
    return min(_work() for _ in range(9))


def _work() -> float:
    begin = time.process_time()
    rows, matrix, counts = torch.ones(64, 512), torch.ones(512, 512), dict[int, int]()
    for index in range(200_000):
        counts[index % 977] = counts.get(index % 977, 0) + index
    for _ in range(60):
        torch.softmax(rows @ matrix, -1)
    for _ in range(5_000):
        rows[:1].add(1.0)
    return time.process_time() - begin


def read_budget() -> dict[str, dict[str, float]]:
    """Return file -> tier -> CPU seconds, and ``machine`` -> ``calibration`` -> seconds."""
    found: dict[str, dict[str, float]] = json.loads(BUDGET.read_text())
    return found


def scale(budget: dict[str, dict[str, float]]) -> float:
    """Return how many seconds of this machine are one of the budget's."""
    return calibration() / budget["machine"]["calibration"]


def allowed(file: str, tier: str, budget: dict[str, dict[str, float]], factor: float) -> float:
    """Return the CPU seconds of this machine that a file may take in a tier."""
    own = budget.get(file, {}).get(tier, DEFAULTS[tier])
    return factor * max(_LEAST + own, _HEADROOM * own)


def files_above(
    measured: dict[str, float], tier: str, budget: dict[str, dict[str, float]], factor: float
) -> list[str]:
    """Return the files that take more CPU seconds than they may."""
    return [f for f, seconds in measured.items() if seconds > allowed(f, tier, budget, factor)]


def exceeded(
    measured: dict[str, dict[str, float]], budget: dict[str, dict[str, float]], factor: float
) -> list[str]:
    """Return a line for each file, and the quick tier, that takes more than it may.

    Args:
        measured: tier -> file -> CPU seconds.
        budget: as of `read_budget`.
        factor: see `scale`.
    """
    lines = [
        f"{file} takes {measured[tier][file]:.1f} CPU seconds in the {tier} tier, and may take "
        f"{allowed(file, tier, budget, factor):.1f} here: make it cheaper, mark tests `deep`, or "
        "raise its budget"
        for tier in DEFAULTS
        for file in files_above(measured.get(tier, {}), tier, budget, factor)
    ]
    total, of_tier = sum(measured.get("quick", {}).values()), factor * QUICK_SECONDS
    if total > of_tier:
        lines.append(
            f"the quick tier takes {total:.0f} CPU seconds, and may take {of_tier:.0f} here: mark "
            "tests `deep` that find few faults for their time"
        )
    return lines


def alone(file: str, tier: str) -> float:
    """Return the CPU seconds of a file of tests that runs by itself."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"DEEP": "1"} if tier == "deep" else {})
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "measured.json"
        command = [sys.executable, "-m", "pytest", "-q", file, f"--cpu-seconds={found}"]
        marks = ["-m", DEEP_TIER] if tier == "deep" else []
        subprocess.run(command + marks, cwd=BUDGET.parents[1], env=environment, check=False)
        seconds: float = json.loads(found.read_text())["files"].get(file, 0.0)
    return seconds


def measure_again(
    measured: dict[str, dict[str, float]], budget: dict[str, dict[str, float]], factor: float
) -> dict[str, dict[str, float]]:
    """Return the measured seconds, with those of files above their budget from a run of their own.

    Too many files above it are not measured again.
    """
    above = [
        (t, f)
        for t in measured
        if t in DEFAULTS
        for f in files_above(measured[t], t, budget, factor)
    ]
    if len(above) > _AGAIN:
        return measured
    fresh = {tier: dict(files) for tier, files in measured.items()}
    for tier, file in above:
        print(
            f"{file}: {measured[tier][file]:.1f} CPU seconds; it runs again by itself", flush=True
        )
        fresh[tier][file] = min(measured[tier][file], alone(file, tier))
    return fresh


def written(
    budget: dict[str, dict[str, float]], measured: dict[str, dict[str, float]], seconds: float
) -> dict[str, dict[str, float]]:
    """Return the budget with what was measured where the calibration took these seconds."""
    factor = seconds / budget["machine"]["calibration"] if budget else 1.0
    fresh = {"machine": budget.get("machine", {"calibration": seconds})}
    measured = {tier: files for tier, files in measured.items() if tier in DEFAULTS}
    names = {file for files in measured.values() for file in files} | (set(budget) - {"machine"})
    for file in sorted(name for name in names if (BUDGET.parents[1] / name).exists()):
        own = {tier: files[file] / factor for tier, files in measured.items() if file in files}
        fresh[file] = {tier: round(s, 1) for tier, s in (budget.get(file, {}) | own).items()}
    return fresh


def main(arguments: list[str]) -> int:
    measured: dict[str, dict[str, float]] = {}
    for name in arguments:
        if name != "--write":
            found = json.loads(Path(name).read_text())
            measured.setdefault(found["tier"], {}).update(found["files"])
    if "--write" in arguments:
        before = read_budget() if BUDGET.exists() else {}
        fresh = written(before, measured, calibration())
        BUDGET.write_text(json.dumps(fresh, indent=1) + "\n")
        return 0
    budget = read_budget()
    factor = scale(budget)
    measured = measure_again(measured, budget, factor)
    too_much = exceeded(measured, budget, factor)
    for tier, files in measured.items():
        print(f"{tier}: {sum(files.values()) / 60:.1f} CPU minutes")
    print(f"a second of the budget is {factor:.2f} on this machine", *too_much, sep="\n")
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
