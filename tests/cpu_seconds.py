"""A pytest plugin that writes down the CPU seconds of each test and file: ``--cpu-seconds=FILE``.

    python -m tests.cpu_seconds FILE...     minutes of each run, and one closing line for all

Wall time on a shared machine says more about the neighbours than about a test. CPU seconds are user
and system time of the process and of every process below it, those that still run included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
DEEP_TIER = "deep and not gpu and not nightly"
_TIERS = {"not gpu and not deep": "quick", DEEP_TIER: "deep"}
_COUNTED = "failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error"
_TEST, _IMPORT = "cpu_seconds", "cpu_seconds_of_import"


def cpu_seconds() -> float:
    """CPU seconds so far of this process, its threads, and its children to any depth."""
    times = os.times()
    below = sum(_of_process(child) for child in _children(os.getpid()))
    return times.user + times.system + times.children_user + times.children_system + below


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        lists = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks]
    except OSError:  # it has ended
        return []
    return [int(child) for one in lists for child in one.split()]


def _of_process(pid: int) -> float:
    try:
        # The name of a program may have spaces: fields are counted after its bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / _TICKS
    return own + sum(_of_process(child) for child in _children(pid))


class CpuSeconds:
    """Measures in each process that runs tests; the process of the user writes the file."""

    def __init__(self, path: Path, tier: str) -> None:
        self._path, self._tier = path, tier
        self._begin = time.time()
        self._since = 0.0
        self._collected: dict[str, float] = {}
        self._tests: dict[str, float] = defaultdict(float)
        self._imports: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        before = cpu_seconds()
        report = yield
        if isinstance(collector, pytest.Module):
            self._collected[collector.nodeid] = cpu_seconds() - before
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._since = cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        until = cpu_seconds()
        file = item.nodeid.partition("::")[0]
        report.user_properties.append((_TEST, until - self._since))
        report.user_properties.append((_IMPORT, self._collected.get(file, 0.0)))
        self._since = until
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured = dict(report.user_properties)
        self._tests[report.nodeid] += float(str(measured.get(_TEST, 0.0)))
        file = report.nodeid.partition("::")[0]
        self._imports[file] = float(str(measured.get(_IMPORT, 0.0)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        files: dict[str, float] = dict(self._imports)
        for test, seconds in self._tests.items():
            files[test.partition("::")[0]] += seconds
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        found = {
            "tier": self._tier,
            "outcomes": {name: len(reporter.stats.get(name, ())) for name in _COUNTED},
            "wall_seconds": round(time.time() - self._begin, 2),
            "files": _by_cost(files),
            "tests": _by_cost(self._tests),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def closing_line(runs: list[dict[str, Any]]) -> str:
    """Return pytest's last line for all the runs.

    Args:
        runs: as the plugin wrote them.
    """
    counts = {name: sum(run["outcomes"][name] for run in runs) for name in _COUNTED}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    text = f" {said or 'no tests ran'} in {sum(run['wall_seconds'] for run in runs):.2f}s "
    return f"{text:=^80}"


def _by_cost(seconds: dict[str, float]) -> dict[str, float]:
    costs = sorted(seconds.items(), key=lambda own: -own[1])
    return {name: round(own, 2) for name, own in costs}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write CPU seconds of tests")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--cpu-seconds"):
        tier = _TIERS.get(config.option.markexpr, "all")
        config.pluginmanager.register(CpuSeconds(path, tier), "cpu-seconds-of-tests")


if __name__ == "__main__":
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    for run in runs:
        minutes, wall = sum(run["files"].values()) / 60, run["wall_seconds"] / 60
        print(f"{run['tier']} tier: {minutes:.1f} CPU minutes, {wall:.1f} of wall time")
    print(closing_line(runs))
