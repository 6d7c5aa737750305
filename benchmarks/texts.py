"""Texts that benchmarks share: held-out ones in tests/data, and others that this machine has."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import torch

from examples.demo_data import NEAR_DUPLICATE, long_lines

ROOT = Path(__file__).parents[1]
TEXTS = ("prose", "python", "cpp")


def calibration_text(characters: int) -> str:
    """Equal parts of three kinds, without what resembles the held-out text."""
    parts = []
    for kind in ("python", "cpp", "prose"):
        pieces, size = [], 0
        for text in other_texts(kind):
            pieces.append(text)
            size += len(pieces[-1])
            if size >= characters // 3:
                break
        parts += pieces
    return "\n".join(parts)


def other_texts(kind: str) -> Iterator[str]:
    """Beginnings of what this machine has of a kind, without what resembles the held-out text."""
    held = set().union(*(long_lines(heldout(name)) for name in TEXTS))
    for text in {"python": _python, "cpp": _cpp, "prose": _prose}[kind]():
        lines = long_lines(text)
        if lines and len(lines & held) <= NEAR_DUPLICATE * len(lines):
            yield text[:20_000]


def heldout(name: str) -> str:
    return (ROOT / f"tests/data/heldout_{name}.txt").read_text()


def _python() -> Iterator[str]:
    return _files(Path(sysconfig.get_path("stdlib")), "*.py")


def _cpp() -> Iterator[str]:
    return _files(Path(torch.__file__).parent / "include/torch", "*.h")


def _files(folder: Path, pattern: str) -> Iterator[str]:
    skipped = ("test", "site-packages", "lib2to3", "idlelib")
    paths = sorted(
        path
        for path in folder.rglob(pattern)
        if not any(word in str(path.relative_to(folder)) for word in skipped)
    )
    random.Random(0).shuffle(paths)
    return (path.read_text("utf-8", errors="ignore") for path in paths)


def _prose() -> Iterator[str]:
    texts = {d.metadata["Name"]: d.metadata.get_payload() for d in distributions()}  # type: ignore[attr-defined]
    return (texts[name] for name in sorted(texts, key=str) if isinstance(texts[name], str))
