"""Pages say what is there: links, files, commands and their options."""

from __future__ import annotations

import argparse
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe.cli import build_parser

ROOT = Path(__file__).parents[1]
DATED = (*(ROOT / "docs/results").glob("2*.md"), *(ROOT / "lab/results").glob("2*.md"))
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/results").glob("*.md"),
    *(ROOT / "lab/results").glob("*.md"),
    *(ROOT / "examples").glob("*/README.md"),
)
LIVING = [page for page in PAGES if page not in DATED]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).lower() for text in headings]
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


@cache
def options_of(module: str) -> set[str] | None:
    """Options of a program of ours, and of the modules beside it; None: it is not ours."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    if not origin.is_relative_to(ROOT) or module.startswith("moe"):
        return None
    files = origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]
    return {o for file in files for o in re.findall(r'"(--[a-z][a-z-]*)"', file.read_text())}


COMMAND = re.compile(r"python -m ((?:benchmarks|lab|examples|tests)[\w.]*)([^`|\n]*)")


@pytest.mark.parametrize("page", LIVING, ids=named)
def test_commands_are_there(page: Path) -> None:
    text, wrong = page.read_text(), []
    for module, rest in COMMAND.findall(text):
        module = module.rstrip(".")
        if find_spec(module) is None:
            wrong.append(module)
            continue
        known = options_of(module)
        used = re.findall(r"(?<=[\s\[])(--[a-z][a-z-]*)", rest.partition("#")[0])
        wrong += [f"{module} {option}" for option in used if known and option not in known]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    wrong += [
        f"make {name}" for name in re.findall(r"`make ([a-z-]+)", text) if name not in targets
    ]
    files = re.findall(
        r"`?((?:tests|docs|lab|benchmarks|examples|moe|offload|experts|routing|kernels|configs)/[\w./-]+\.(?:py|md|json|yaml|txt))",
        text,
    )
    wrong += [file for file in files if not (ROOT / file).is_file()]
    assert wrong == []


def test_commands_of_moe_are_there() -> None:
    """In pages, and in errors and docstrings of the product."""
    (known,) = [
        set(action.choices)
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    files = [*LIVING, *(ROOT / "moe").rglob("*.py")]
    said = {named(f): re.findall(r"`moe ([a-z]+)", f.read_text()) for f in files}
    wrong = [(name, word) for name, words in said.items() for word in words if word not in known]
    assert wrong == []


@pytest.mark.parametrize("page", DATED, ids=named)
def test_commands_of_dated_pages_have_their_module(page: Path) -> None:
    """Their options may be of that day."""
    modules = {module.rstrip(".") for module, _ in COMMAND.findall(page.read_text())}
    assert [module for module in modules if find_spec(module) is None] == []


def test_every_dated_page_is_named_by_a_claim() -> None:
    """Pages in docs/results are what other pages state; those in lab/results are listed there."""
    living = [page for page in LIVING if page.parent != ROOT / "docs/results"]
    text = "".join(page.read_text() for page in living)
    lists = {
        room: (ROOT / room / "README.md").read_text() for room in ("docs/results", "lab/results")
    }
    wrong = [named(page) for page in DATED if page.name not in lists[named(page.parent)]]
    wrong += [named(page) for page in DATED if page.parts[-3] == "docs" and page.name not in text]
    assert wrong == []


TIER = re.compile(r"`make (test|test-deep)` \(([^)]*)\)")


@pytest.mark.parametrize("page", LIVING, ids=named)
def test_claims_name_tests_of_their_tier(page: Path) -> None:
    for tier, names in TIER.findall(page.read_text()):
        for name in re.findall(r"`(tests/[^`]+)`", names):
            found = [ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("test_*.py")
            texts = [file.read_text() for file in found]
            assert texts, name
            quick = any("\npytestmark = pytest.mark.deep" not in text for text in texts)
            deep = any("deep" in text for text in texts)
            assert deep if tier == "test-deep" else quick, (tier, name)
