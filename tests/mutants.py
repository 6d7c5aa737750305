"""Mutants of a module, made by program: each is the module without one of its guards.

- a ``raise`` is left out;
- a guard that returns, goes on or breaks early never does;
- a limit (a number in capitals at the top of the module) is a thousand times as large;
- a call that checks or limits (`CHECKS`) is left out, and so is an attribute that says the least or
  the most that is allowed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHECKS = re.compile(
    r"_?(check|verify|refuse|require|validate|limit|untrusted)\w*|setrlimit|prctl|settimeout|chmod"
    r"|flock|end_by"
)
BOUNDS = re.compile(r"(minimum|maximum|most|least|max|min)_\w+")
LIMIT = re.compile(r"_?[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        line: where it is.
        was: the text there.
        source: the whole module with the change.
        kind: of the change.
    """

    line: int
    was: str
    source: str
    kind: str

    def name(self, file: str) -> str:
        """The same as long as the text of the guard and its number among its like are."""
        return f"{file}: {self.kind}: {' '.join(self.was.split())[:90]}"


def mutants_of(source: str, within: str = "") -> Iterator[Mutant]:
    """All mutants of a module, in order.

    Args:
        within: only those of this function or class; empty: of the module.
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    for node in _guards(_part(tree, within)):
        if (change := _change(node)) is not None:
            kind, at, new = change
            yield Mutant(node.lineno, _text(lines, at), _replaced(lines, at, new), kind)


def limits_of(source: str, within: str = "") -> dict[str, float]:
    """The limits of a module by their names, and their values."""
    assigned = [_assigned(node) for node in _guards(_part(ast.parse(source), within))]
    return {
        target.id: _value(value)
        for target, value in assigned
        if isinstance(target, ast.Name) and value is not None and _is_limit(target, value)
    }


def _value(number: ast.expr) -> float:
    value: float = eval(compile(ast.Expression(number), "limit", "eval"), {})  # noqa: S307
    return value


def _is_limit(target: ast.Name, value: ast.expr) -> bool:
    return not target.col_offset and bool(LIMIT.fullmatch(target.id)) and _is_number(value)


def _part(tree: ast.Module, within: str) -> ast.AST:
    if not within:
        return tree
    parts = (node for node in ast.walk(tree) if getattr(node, "name", None) == within)
    return next(parts)


def _guards(part: ast.AST) -> list[ast.stmt]:
    found = [node for node in ast.walk(part) if isinstance(node, ast.stmt)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _change(node: ast.stmt) -> tuple[str, ast.AST, str] | None:
    """The kind of the mutant of a statement, what is replaced, and by what."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        return "raise", node, "pass"
    ends = ast.Return, ast.Continue, ast.Break
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ends):
        return ("early end", node.test, "False") if len(node.body) == 1 else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        return ("check", node, "pass") if CHECKS.fullmatch(name) else None
    target, value = _assigned(node)
    if isinstance(target, ast.Attribute) and BOUNDS.fullmatch(target.attr):
        return "bound", node, "pass"
    if not isinstance(target, ast.Name) or value is None or not _is_limit(target, value):
        return None
    return "limit", value, f"1000 * ({ast.unparse(value)})"


def _assigned(node: ast.stmt) -> tuple[ast.expr | None, ast.expr | None]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) else (None, None)


def _is_number(value: ast.expr) -> bool:
    kinds = (ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop)
    return all(isinstance(node, kinds) for node in ast.walk(value)) and all(
        type(node.value) in (int, float)
        for node in ast.walk(value)
        if isinstance(node, ast.Constant)
    )


def _replaced(lines: list[str], at: ast.AST, new: str) -> str:
    start, stop = _range(lines, at)
    text = "".join(lines).encode()
    rows = text[start:stop].count(b"\n")  # lines behind it keep their numbers
    if rows:
        new = f"({new}{chr(10) * rows})" if isinstance(at, ast.expr) else new + "\n" * rows
    return (text[:start] + new.encode() + text[stop:]).decode()


def _text(lines: list[str], at: ast.AST) -> str:
    start, stop = _range(lines, at)
    return "".join(lines).encode()[start:stop].decode()


def _range(lines: list[str], at: Any) -> tuple[int, int]:
    """Bytes of a node in a module; columns count bytes."""
    before = [0]
    for line in lines:
        before.append(before[-1] + len(line.encode()))
    start = before[at.lineno - 1] + at.col_offset
    return start, before[at.end_lineno - 1] + at.end_col_offset


def digest_of(*texts: str) -> str:
    """Changes with any of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
