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
        lines: where a test meets it: its own, or for a limit those that name it.
        limit: its name, for a mutant of one.
        was: the text there.
        source: the whole module with the change.
        kind: of the change.
    """

    lines: tuple[int, ...]
    limit: str
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
            limit = _name(node) if kind == "limit" else ""
            met = _lines_that_name(tree, limit) if limit else (node.lineno,)
            yield Mutant(met, limit, _text(lines, at), _replaced(lines, at, new), kind)


def _name(limit: ast.stmt) -> str:
    target, _ = _assigned(limit)
    return str(getattr(target, "id", ""))


def _lines_that_name(tree: ast.Module, limit: str) -> tuple[int, ...]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == limit)
    return tuple(sorted({name.lineno for name in names if isinstance(name.ctx, ast.Load)}))


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
    if not isinstance(target, ast.Name) or node.col_offset or not LIMIT.fullmatch(target.id):
        return None
    if value is None or not _is_number(value):
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
