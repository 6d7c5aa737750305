"""The table of methods: each declaration is whole and light, and the core does without each."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from moe.hooks import Method, _imported, methods
from moe.settings.profile import KEYS
from tests import floors
from tests.without_method import check, without_section

METHODS = {method.name: method for method in methods()}
each = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


def places(method: Method) -> list[str]:
    """Where the code of a method is, as its declaration names it."""
    return [*method.hooks.values(), *(at for of in method.choices.values() for at in of.values())]


def hooks_of_the_core() -> dict[str, set[str]]:
    """Names that the core gives to its hooks and choices, by kind."""
    found: dict[str, set[str]] = {"Hook": set(), "ModelHook": set(), "Registry": set()}
    for file in floors.modules().values():
        text = file.read_text()
        made = re.findall(r'\b(\w*Hook|Registry)\[.*?\]\(\s*"([\w.]+)"', text, re.DOTALL)
        for kind, name in made:
            found[kind].add(name)
    return found


def test_declarations_import_no_torch() -> None:
    code = "import sys, moe.hooks; moe.hooks.methods(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


@each
def test_a_declaration_is_whole(method: Method) -> None:
    assert method.about
    assert method.price
    assert method.switches, "nothing switches it on"
    assert (method.settings is None) == (
        not any(f"methods.{method.name}." in k for k in KEYS.leaves)
    )
    assert [file for file in method.files if not (floors.ROOT / file).is_file()] == []
    assert any(file.startswith("tests/") for file in method.files), "it has no test of its own"
    assert set(method.moved.values()) <= set(KEYS.leaves)
    assert not set(method.moved) & set(KEYS.leaves)
    words: Any = importlib.import_module(f"moe.methods.{method.name}").__doc__
    commands = re.findall(r"python -m ((?:benchmarks|lab)[\w.]*)", words)
    assert commands or "moe eval" in words or "moe bench" in words, "no command measures it"
    assert [name for name in commands if find_spec(name) is None] == []
    assert "Differs" in words


@each
def test_the_core_has_the_hooks_that_it_fills(method: Method) -> None:
    known = hooks_of_the_core()
    assert set(method.hooks) <= known["ModelHook" if method.serves else "Hook"]
    assert set(method.choices) <= known["Registry"]
    for place in places(method):
        assert place.startswith(f"moe.methods.{method.name}.")
        assert callable(_imported(place))


def test_methods_import_no_other_method() -> None:
    known = floors.modules()
    found = [
        f"{module} imports {target}"
        for module in known
        for target in floors.imports(module, known)
        if target.startswith("moe.methods.") and module.split(".")[:3] != target.split(".")[:3]
    ]
    assert found == []


def test_the_core_names_no_method_as_a_module() -> None:
    """Not in a text either, from which it could import one."""
    found = [
        module
        for module, file in floors.modules().items()
        if not module.startswith("moe.methods")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and any(f"moe.methods.{name}" in node.value for name in METHODS)
    ]
    assert found == []


def test_a_section_goes_with_its_method() -> None:
    text = "methods:\n  one:  # x\n    a: 1  # y\n            # z\n  two:\n    b: 2\nserver:\n"
    assert without_section(text, "one") == "methods:\n  two:\n    b: 2\nserver:\n"
    assert without_section(text, "two").endswith("# z\nserver:\n")


@pytest.mark.deep
@each
def test_the_rest_imports_without_each(method: Method) -> None:
    check([method.name], only_import=True)


@pytest.mark.deep
def test_the_core_type_checks_and_passes_without_all() -> None:
    """No method imports another, so each can go if all can."""
    check(list(METHODS))
