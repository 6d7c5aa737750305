"""Methods of other packages: the example as a distribution in a folder, without an installer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "routing_policy"


def installed(folder: Path, value: str = "at_least:METHOD", name: str = "at_least") -> Path:
    """Lay the example's package and metadata out as an installer does."""
    copytree(EXAMPLE / "at_least", folder / "at_least")
    facts = folder / "at_least-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: at-least\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[moe.methods]\n{name} = {value}\n")
    return folder


def moe(folder: Path, *argv: str, code: int = 0) -> str:
    """The output of a command where this folder is on the path."""
    command = [sys.executable, "-m", "moe", *argv]
    path = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    return ran.stdout + ran.stderr


def test_the_example_names_its_entry_point() -> None:
    assert 'at_least = "at_least:METHOD"' in (EXAMPLE / "pyproject.toml").read_text()
    assert '[project.entry-points."moe.methods"]' in (EXAMPLE / "pyproject.toml").read_text()


def test_a_method_of_another_package_is_listed(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    assert "routing.policies: at_least" in moe(folder, "methods")
    assert "Tokens leave out experts that weigh less" in moe(folder, "methods", "at_least")


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        ("at_least:NOTHING", "at_least", "method 'at_least' of at-least (at_least:NOTHING) cannot"),
        ("at_least:__doc__", "at_least", "must be a moe.hooks.Method, and is a str"),
        ("at_least:METHOD", "at-least", "must be a Python identifier that no other method has"),
    ],
)
def test_a_package_that_is_wrong_is_named(
    tmp_path: Path, value: str, name: str, message: str
) -> None:
    shown = moe(installed(tmp_path, value, name), "methods", code=2)
    assert message in shown
    assert "uninstall" in shown
    assert "Traceback" not in shown


@pytest.mark.deep
def test_its_policy_routes_a_model(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    demo = [str(ROOT / "examples" / "demo-model"), "--prompt", "def main", "--max-new-tokens", "4"]
    lossy = ["--set", "lossless=false"]

    def policy(text: str) -> list[str]:
        return ["--set", f'routing.policies=["{text}"]']

    assert moe(folder, "generate", *demo, *lossy, *policy("at_least:0.3"))
    wrong = moe(folder, "generate", *demo, *lossy, *policy("at_least:2"), code=2)
    assert "write at_least:SHARE with a share in (0, 1]" in wrong
    assert "at_least" in moe(folder, "generate", *demo, *policy("at_least:0.3"), code=2)
