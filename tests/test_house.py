"""The house: rooms and floors, and what must never appear in our code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import floors
from tests.floors import ROOMS, ROOT


def source_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


MODULES = floors.modules()


def imported(statements: list[ast.AST], package: str) -> Iterator[str]:
    """Absolute names of the modules that the statements import, ours and others'."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = [*base, node.module] if node.level else [node.module or ""]
            source = ".".join(filter(None, prefix))
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name in MODULES)
            if not all(name in MODULES for name in names):
                yield source


def package_of(name: str) -> str:
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def test_imports_go_down_only() -> None:
    assert floors.upward() == []


def test_an_import_that_goes_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(floors.modules())
    for name, source in {
        "moe.network.high": "def f():\n    from moe.engine.engine import Engine",
        "kernels.high": "from routing import Routing",
        "offload.high": "import moe.errors",
        "moe.engine.fine": "from moe.network import lanes\nimport offload.cache\nimport moe",
    }.items():
        known[name] = tmp_path / f"{name}.py"
        known[name].write_text(source)
    monkeypatch.setattr(floors, "modules", lambda: known)
    assert floors.upward() == [
        "moe.network.high imports moe.engine.engine",
        "kernels.high imports routing",
        "offload.high imports moe.errors",
    ]


def test_every_room_has_its_floor() -> None:
    inside = {floors.room_of(name) for name in MODULES if name.startswith("moe.")}
    assert inside - {"__main__"} == set(floors.FLOORS)


def test_the_architecture_page_shows_the_floors() -> None:
    page = floors.ARCHITECTURE.read_text()
    assert floors.in_page(page) == page, "run python -m tests.floors --write"


MAY_IMPORT = {
    "benchmarks": ("benchmarks", "lab", "tests/benchmarks", "tests/lab"),
    "lab": ("lab", "tests/lab"),
}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_only_its_own_import_it(folder: str) -> None:
    """The product imports no benchmark, and no benchmark the laboratory."""
    everything = source_files(*ROOMS, "benchmarks", "examples", "lab", "tests")
    allowed = {file for own in MAY_IMPORT[folder] for file in source_files(own)}
    pattern = re.compile(rf"^\s*(from|import) {folder}\b", re.MULTILINE)
    found = [
        str(f.relative_to(ROOT))
        for f in everything
        if f not in allowed and pattern.search(f.read_text())
    ]
    assert found == []


def test_one_name_one_meaning() -> None:
    """No two public classes of the product share a name."""
    homes: dict[str, list[str]] = {}
    for name, file in MODULES.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements outside functions, those for type checkers too: a circle of types is one."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from at_import(getattr(node, block, []))


def packages_above(name: str) -> set[str]:
    """Their code runs before that of the module."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def test_no_circular_imports() -> None:
    graph = {}
    for name, file in MODULES.items():
        statements = list(at_import(ast.parse(file.read_text()).body))
        targets = {t for t in imported(statements, package_of(name)) if t in MODULES}
        above = set[str]().union(*map(packages_above, targets)) - packages_above(name) - {name}
        graph[name] = targets | above
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_is_importable(room: str) -> None:
    package = importlib.import_module(room)
    assert package.__file__ is not None
    assert Path(package.__file__).is_relative_to(ROOT), f"{room} comes from {package.__file__}"
    for module in pkgutil.walk_packages(package.__path__, f"{room}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


FORBIDDEN_CODE = {
    r"\b(c?pickle|dill|marshal|shelve)\b": "runs code from a file",
    r"\btorch\.load\(": "reads pickle",
    r"\b(Trainer|load_sharded_checkpoint|load_state_dict_from_url)\b": "reads pickle",
    r"\btrust_remote_code=True": "runs code from a model repository",
    r"(?<![.\w])(eval|exec)\(": "runs text as code",
    r"\bshell=True|\bos\.(system|popen)\(": "runs text in a shell",
    r"\byaml\.(unsafe_|full_)load\(": "builds arbitrary objects",
    r"\bNotImplementedError\b": "unfinished",
}
FORBIDDEN_TEXT = {
    r"0\.0\.0\.0|tcp://\*": "listens on every interface",
    r"\b(TODO|FIXME|XXX)\b": "unfinished",
}
OUR_CODE = source_files(*ROOMS, "benchmarks", "examples", "lab")


@cache
def code_lines(file: Path) -> dict[int, str]:
    """Line number -> the line's tokens, joined without spaces between them but for names; strings
    and comments left out: an error message may say what pickle is."""
    lines: dict[int, str] = {}
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type in (tokenize.NAME, tokenize.OP):
                before = lines.get(token.start[0], "")
                space = " " if before[-1:].isidentifier() and token.type == tokenize.NAME else ""
                lines[token.start[0]] = before + space + token.string
    return lines


@pytest.mark.parametrize("pattern", FORBIDDEN_CODE)
def test_forbidden_code(pattern: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {FORBIDDEN_CODE[pattern]}"
        for file in OUR_CODE
        for number, line in code_lines(file).items()
        if re.search(pattern, line)
    ]
    assert not found


@pytest.mark.parametrize("pattern", FORBIDDEN_TEXT)
def test_forbidden_text(pattern: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {FORBIDDEN_TEXT[pattern]}"
        for file in OUR_CODE
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("import pickle as p", "pickle"),
        ("x = torch . load ( y )", "torch"),
        ("f(trust_remote_code = True)", "trust"),
        ("print(eval(x))", "eval"),
        ("run(c, shell = True)", "shell"),
    ],
)
def test_the_search_for_forbidden_code_finds_it(tmp_path: Path, source: str, pattern: str) -> None:
    file = tmp_path / "x.py"
    file.write_text(f"'pickle torch.load( eval('  # pickle\n{source}\nmodel.eval()\n")
    (only,) = (p for p in FORBIDDEN_CODE if f"{pattern}" in p)
    assert [n for n, line in code_lines(file).items() if re.search(only, line)] == [2]


NOUN_CLAUSES = ("What", "Whether", "How", "Of", "Those", "Where")
ALLOWED = {"moe": 32, "examples": 8, "benchmarks": 54, "lab": 59}
"""Docstrings that still begin so, by folder; the numbers only fall. Other folders have none."""


def docstrings(file: Path) -> Iterator[str]:
    """Docstrings, and the texts under attributes."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


@pytest.mark.parametrize("folder", [*ROOMS, "benchmarks", "examples", "lab"])
def test_docstrings_are_sentences_in_which_a_subject_acts(folder: str) -> None:
    """A benchmark may ask a question."""
    found = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in source_files(folder)
        for text in docstrings(file)
        if text.partition(" ")[0] in NOUN_CLAUSES and not text.split("\n\n")[0].endswith("?")
    ]
    assert len(found) <= ALLOWED.get(folder, 0), "\n".join(found)
