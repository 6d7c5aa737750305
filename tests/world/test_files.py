"""Files of others come whole, or tests that need them are skipped with a reason."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.world import files


def archive(place: Path, *names: str) -> None:
    with tarfile.open(place / "package-1.0.tar.gz", "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"package-1.0/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))


def test_only_what_tests_read_is_extracted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(argv: list[str], **how: Any) -> None:
        assert argv[-1] == "package==1.0"
        archive(
            Path(argv[argv.index("--dest") + 1]),
            *("json/tests/a.json", "json/bin/run", "json/tests/deep/b.json", "jsonschema/tests/c"),
        )

    folder = tmp_path / "world" / "suite"
    monkeypatch.setitem(files.SOURCES, folder, files.Source("package==1.0", "json", ("tests",)))
    monkeypatch.setattr(subprocess, "run", download)
    files.fetch(folder)
    found = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.json"))]
    assert found == ["tests/a.json", "tests/deep/b.json"]
    assert (folder / "tests" / "a.json").read_text() == "json/tests/a.json"
    assert [path.name for path in folder.iterdir()] == ["tests"]
    assert [path.name for path in folder.parent.iterdir()] == ["suite"]


def test_a_download_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(argv: list[str], **how: Any) -> None:
        raise subprocess.CalledProcessError(1, argv)

    folder = tmp_path / "suite"
    monkeypatch.setitem(files.SOURCES, folder, files.Source("package==1.0", "json", ("tests",)))
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(subprocess.CalledProcessError):
        files.fetch(folder)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(pytest.skip.Exception, match="files` fetches package"):
        files.needed(folder)
