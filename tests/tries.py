"""Tries mutants with the same tests: each in a fork of a process that has collected the tests.

The fork has the mutant twice: in the file, for processes that a test starts, and in the functions
that are there, whose code it exchanges. A mutant of what runs when its module is imported begins
anew. First the tests run without a mutant. They must pass, and
the process notes which of them come to which lines: a mutant meets those first, the quickest of
them at the beginning.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutants import digest_of

_LEAST_SECONDS = 20.0
_TIMES = 4.0
"""A test hangs that takes longer than both: seconds, and times those that it took before."""
_ALL_SECONDS = 1800.0
"""Of all tests without a mutant, which are traced."""
_PAUSE_S = 0.02
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu")


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that should notice.

    Attributes:
        file: the module, relative to the tree.
        source: the mutant.
        tests: arguments of pytest.
        line: of the module; tests that come to it run first. 0: none.
    """

    name: str
    file: str
    source: str
    tests: tuple[str, ...]
    line: int = 0

    def digest(self, root: Path) -> str:
        """Changes with the mutant and its tests."""
        files = sorted({test.partition("::")[0] for test in self.tests if test.endswith(".py")})
        return digest_of(self.source, *self.tests, *((root / file).read_text() for file in files))


def try_all(tree: Path, trials: Sequence[Trial]) -> Iterator[tuple[Trial, str, str, float]]:
    """Each trial with what became of its mutant, the test that noticed, and the seconds that took.

    A mutant is ``killed`` by a test that fails, ``SURVIVED``, or ``HUNG``. One that hangs in the
    same test twice is killed by that test: a test that never ends does not pass. One that hangs in
    two tests, or in none, counts as a survivor.

    Args:
        tree: a copy of the repository, which is changed meanwhile.
        trials: of the same tests.

    Raises:
        RuntimeError: the tests fail without a mutant.
    """
    told, tells = os.pipe()
    stem = os.fork()
    if stem == 0:
        try:
            os.close(told)
            _run(tree, trials, tells)
        finally:
            os._exit(3)
    os.close(tells)
    with os.fdopen(told) as lines:
        done = 0
        for line in lines:
            yield trials[done], *json.loads(line)
            done += 1
    os.waitpid(stem, 0)
    if done < len(trials):
        raise RuntimeError(f"without a mutant these tests fail: {' '.join(trials[0].tests)}")


def _run(tree: Path, trials: Sequence[Trial], tells: int) -> None:
    """In a child: pytest on the copy, whose modules nothing has imported yet."""
    os.chdir(tree)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    here = str(Path(__file__).parents[1])
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", here))]
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    code = pytest.main([*_OPTIONS, *trials[0].tests], plugins=[_Stem(tree, trials, tells)])
    os._exit(int(code))


class _Stem:
    """A plugin of pytest that forks where tests would begin: a fork runs them with one mutant."""

    def __init__(self, tree: Path, trials: Sequence[Trial], tells: int) -> None:
        self._tree, self._trials, self._tells = tree, trials, tells

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        reached = self._tree / "reached.json"
        code = _forked(lambda: ("", _ALL_SECONDS))
        if code is None:
            files = {trial.file for trial in self._trials}
            session.config.pluginmanager.register(_Reach(self._tree, files, reached))
            return None  # go on
        if code != 0:
            return True
        tests: list[tuple[str, float, list[list[Any]]]] = json.loads(reached.read_text())
        took = {test: seconds for test, seconds, _ in tests}
        for trial in self._trials:
            begun = time.monotonic()
            file = self._tree / trial.file
            was = file.read_text()
            file.write_text(trial.source)
            last, hung_in = _Last(self._tree / "last_test"), ""
            for _ in range(2):
                code = _forked(partial(_running, last, took))
                if code is None:
                    if not _exchange(file, was, trial):  # what runs when the module is imported
                        pytest_again = [sys.executable, "-m", "pytest", *_OPTIONS, *trial.tests]
                        os.execv(sys.executable, pytest_again)
                    met = [trial.file, trial.line]
                    first = [test for test, _, lines in tests if met in lines]
                    order = {test: number for number, test in enumerate(first)}
                    session.items.sort(key=lambda item: order.get(item.nodeid, len(order)))
                    session.config.pluginmanager.register(last)
                    return None  # go on
                test = last.test
                became = _WORDS.get(code, "killed")
                if became != "HUNG":
                    break
                if test and test == hung_in:
                    became = "killed"
                hung_in = test
            file.write_text(was)
            said = became, test if became == "killed" else "", round(time.monotonic() - begun, 1)
            os.write(self._tells, json.dumps(said).encode() + b"\n")
        return True


_HUNG = 1000
_WORDS = {0: "SURVIVED", 3: "SURVIVED", 4: "SURVIVED", 5: "SURVIVED", _HUNG: "HUNG"}
"""Of exit codes of pytest; others are failures, or a death by a signal."""


class _Last:
    """A plugin of pytest that writes down which test runs: the last one failed, or hangs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    @property
    def test(self) -> str:
        return self._file.read_text()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write_text(nodeid)


def _running(last: _Last, took: Mapping[str, float]) -> tuple[str, float]:
    """The test that runs, and the most seconds that it may take.

    Args:
        took: seconds of each without a mutant, traced.
    """
    test = last.test
    return test, max(_LEAST_SECONDS, _TIMES * took.get(test, _LEAST_SECONDS))


def _forked(test: Callable[[], tuple[str, float]]) -> int | None:
    """None in the child; its exit code, or `_HUNG`.

    Pauses are counted and not the time: who stops this process stops the child, too.

    Args:
        test: which one runs now, and the most seconds that it may take.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        return None
    begun, pauses = "", 0
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            name, most = test()
            pauses = pauses + 1 if name == begun else 0
            begun = name
            if pauses * _PAUSE_S > most:
                return _HUNG
            time.sleep(_PAUSE_S)
    finally:
        with suppress(ProcessLookupError):  # the child, and what it has started
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _exchange(file: Path, was: str, trial: Trial) -> bool:
    """Give the functions that are there the code of the mutant; False: it is in none of them."""
    codes = {_key(code): code for code in _codes(compile(trial.source, str(file), "exec"))}
    before = {_key(code): code for code in _codes(compile(was, str(file), "exec"))}
    if codes == before:
        return False
    gc.unfreeze()  # else `get_objects` leaves out what `tests.conftest` has frozen
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(file):
            code = codes.get(_key(function.__code__))
            if code is not None and code != function.__code__:
                function.__code__ = code
    return True


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


class _Reach:
    """A plugin of pytest that notes which lines each test runs in this process.

    Args:
        tree: the folder that pytest runs in.
        files: the modules, relative to it.
        result: tests, the quickest first, each with its seconds and lines.
    """

    def __init__(self, tree: Path, files: set[str], result: Path) -> None:
        self._files = {str(tree / file): file for file in files}
        self._result = result
        self._lines: set[tuple[str, int]] = set()
        self._tests: dict[str, list[tuple[str, int]]] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        threading.settrace(self._trace)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._lines = set()
        sys.settrace(self._trace)  # again: a test may have ended it
        done = yield
        sys.settrace(None)
        self._tests[item.nodeid] = sorted(self._lines)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        ordered = sorted(self._tests, key=lambda test: self._seconds[test])
        found = [[test, self._seconds[test], self._tests[test]] for test in ordered]
        self._result.write_text(json.dumps(found))

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None

        def each(frame: FrameType, event: str, _: Any) -> Any:
            self._lines.add((file, frame.f_lineno))
            return each

        return each
