"""Files that others wrote, for tests to compare with: vocabularies, chat templates, schemas.

    python -m tests.world.files      fetches what is missing

Two source distributions on PyPI carry them. llama-cpp-python has llama.cpp's vocabularies with the
token ids that llama.cpp gives for them, and its collection of chat templates; jsonschema has the
JSON-Schema-Test-Suite. Nothing of either is built, installed or committed: what tests read is
extracted to build/world. TEST_WORLD names another folder with the same layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
WORLD = Path(os.environ.get("TEST_WORLD") or ROOT / "build" / "world")

LLAMA_CPP = WORLD / "llama.cpp"
"""`models/ggml-vocab-NAME.gguf`, beside most its `.inp` and `.out`; `models/templates/*.jinja`."""
JSON_SCHEMA_TEST_SUITE = WORLD / "json-schema-test-suite"
"""`tests/DRAFT/*.json`, and `remotes` that they refer to."""


@dataclass(frozen=True)
class Source:
    """A folder of a source distribution.

    Attributes:
        requirement: the distribution, pinned: a release of others changes no test.
        inside: the folder's path in it, below the distribution's own folder.
        wanted: paths below that folder which are extracted.
    """

    requirement: str
    inside: str
    wanted: tuple[str, ...]


SOURCES = {
    LLAMA_CPP: Source("llama-cpp-python==0.3.36", "vendor/llama.cpp", ("models",)),
    JSON_SCHEMA_TEST_SUITE: Source("jsonschema==4.26.0", "json", ("tests", "remotes", "LICENSE")),
}


def needed(folder: Path) -> Path:
    """The folder, or the test is skipped with what would fetch it.

    Args:
        folder: `LLAMA_CPP` or `JSON_SCHEMA_TEST_SUITE`.
    """
    if not folder.is_dir():
        source = SOURCES[folder].requirement
        pytest.skip(f"{folder} is not there: `python -m tests.world.files` fetches {source}")
    return folder


def fetch(folder: Path) -> None:
    """Downloads the source distribution and extracts the folder: whole, or not at all.

    Raises:
        subprocess.CalledProcessError: pip could not have it.
    """
    source = SOURCES[folder]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        name = source.requirement.partition("==")[0]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1"]
        subprocess.run(
            [*pip, "--no-deps", "--no-binary", name, "--dest", place, source.requirement],
            check=True,
            timeout=600,
        )
        (archive,) = Path(place).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(f"{place}/new", members=_members(tar, source), filter="data")
        Path(place, "new").replace(folder)


def _members(tar: tarfile.TarFile, source: Source) -> Iterator[tarfile.TarInfo]:
    inside = PurePosixPath(source.inside)
    for member in tar:
        path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if member.isfile() and path.is_relative_to(inside):
            below = path.relative_to(inside)
            if below.parts[0] in source.wanted:
                yield member.replace(name=str(below), deep=False)


if __name__ == "__main__":
    for folder in SOURCES:
        if not folder.is_dir():
            fetch(folder)
        print(folder)
