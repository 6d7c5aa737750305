"""`tests/faults.yaml` names every fault of the list, and tests that there are."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mutants import limits_of, mutants_of
from tests.mutations import Promise, promises
from tests.tries import Trial, try_all

ROOT = Path(__file__).parents[1]
FAULTS = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text())
MUTATIONS = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text())
NUMBERS = {"A": 19, "B": 14, "C": 24, "D": 7, "E": 14}


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_every_fault_is_there() -> None:
    assert sorted(FAULTS) == sorted(
        f"{letter}{number + 1}" for letter, count in NUMBERS.items() for number in range(count)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_its_tests_are_there(fault: str) -> None:
    assert FAULTS[fault]["fault"][0] in "CDLW"
    assert FAULTS[fault]["tests"]
    missing = [
        test
        for test in FAULTS[fault]["tests"]
        for file, _, name in [test.partition("::")]
        if not (ROOT / file).is_file() or name not in names_in(file)
    ]
    assert not missing


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.name)
def test_each_promise_has_guards_and_tests(promise: Promise) -> None:
    """Of SECURITY.md; and `make mutations` has something to leave out of each guard."""
    assert promise.tests
    for test in promise.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file()
        assert not name or name in names_in(file)
    for guard in promise.guards:
        file, _, within = guard.partition("::")
        assert list(mutants_of((ROOT / file).read_text(), within)), guard
    assert {*promise.by_hand} <= {mutation["fault"] for mutation in MUTATIONS}


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.name)
def test_mutants_by_hand_are_for_tests_of_the_row(promise: Promise) -> None:
    """And those are there: a word of each expression is in the name of one."""
    by_fault = {mutation["fault"]: mutation["test"] for mutation in MUTATIONS}
    for fault in promise.by_hand:
        file, *expression = by_fault[fault]
        of_the_row = [test.partition("::")[2] for test in promise.tests if test.startswith(file)]
        named = names_in(file) if "" in of_the_row else {*of_the_row}
        words = {*" ".join(expression[1:]).split()} - {"and", "or", "not"} or {"test_"}
        assert any(word in name for name in named for word in words), fault


LIMITS = yaml.safe_load((ROOT / "tests" / "limits.yaml").read_text())


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.name)
def test_limits_of_each_promise(promise: Promise) -> None:
    """They are as `tests/limits.yaml` says. To change one is to change what is promised."""
    found: dict[str, dict[str, float]] = {}
    for guard in promise.guards:
        file, _, within = guard.partition("::")
        if limits := limits_of((ROOT / file).read_text(), within):
            found.setdefault(file, {}).update(limits)
    assert found == {file: LIMITS.get(file) for file in found}


def test_a_mutant_is_without_one_guard() -> None:
    source = """
LIMIT = 5 << 2
_KIND = "x"
def f(a):
    if a:
        return
    if a > LIMIT:
        raise ValueError("ä")
    check(a)
    self.minimum_version = 3
    call(a)
"""
    made = list(mutants_of(source))
    assert [(mutant.kind, mutant.was) for mutant in made] == [
        ("limit", "5 << 2"),
        ("early end", "a"),
        ("raise", 'raise ValueError("ä")'),
        ("check", "check(a)"),
        ("bound", "self.minimum_version = 3"),
    ]
    changed = [set(mutant.source.splitlines()) - set(source.splitlines()) for mutant in made]
    assert changed == [
        {"LIMIT = 1000 * (5 << 2)"},
        {"    if False:"},
        {"        pass"},
        {"    pass"},
        {"    pass"},
    ]
    assert limits_of(source) == {"LIMIT": 20}
    assert [mutant.was for mutant in mutants_of(source, "f")] == [m.was for m in made[1:]]


@pytest.mark.deep
def test_what_becomes_of_mutants(tmp_path: Path) -> None:
    """Of a function, and of a file of a process."""
    (tmp_path / "guarded.py").write_text(
        "MOST = 5\ndef check(a):\n    if a > MOST:\n"
        "        raise ValueError(\n            a\n        )\n"
        "    if a == 1:\n        return 1\n    if a == 2:\n        return 2\n    return a + 1\n"
    )
    (tmp_path / "test_guarded.py").write_text(
        "import subprocess, sys\nfrom guarded import check\n"
        "def test_here():\n"
        "    try: check(6)\n"
        "    except ValueError: return\n"
        "    assert False\n"
        "def test_there():\n"
        "    code = 'import guarded, sys; sys.exit(guarded.check(1))'\n"
        "    assert subprocess.run([sys.executable, '-c', code], cwd='.').returncode == 1\n"
    )
    source = (tmp_path / "guarded.py").read_text()
    made = [
        Trial(mutant.was, "guarded.py", mutant.source, ("test_guarded.py",), mutant.line)
        for mutant in mutants_of(source)
    ]
    assert [(became, by) for _, became, by, _ in try_all(tmp_path, made)] == [
        ("killed", ""),  # by a process that begins anew
        ("killed", "test_guarded.py::test_here"),
        ("killed", "test_guarded.py::test_there"),
        ("SURVIVED", ""),
    ]
    assert (tmp_path / "guarded.py").read_text() == source
    (tmp_path / "test_guarded.py").write_text("def test_red(): assert False\n")
    with pytest.raises(RuntimeError, match=r"^without a mutant these tests fail: test_guarded.py$"):
        list(try_all(tmp_path, made))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["fault"])
def test_guards_of_mutations_are_there(mutation: dict[str, Any]) -> None:
    """Else `make mutations` would say so, which few run."""
    assert (ROOT / mutation["file"]).read_text().count(mutation["guard"]) == 1
    assert mutation["without"] != mutation["guard"]
