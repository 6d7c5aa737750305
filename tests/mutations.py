"""Remove guards one after the other, and see that the test of each fails without it.

    python -m tests.mutations [WORD ...]    those whose fault or file has one of the words

Works on a copy of the tree. A mutation that no test notices is a hole in the tests: exit code 1.
It takes a quarter of an hour, so the suite does not run it; it is for those who change a guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.yaml")
_SECONDS = 300


def main(words: list[str]) -> int:
    mutations = yaml.safe_load(LIST.read_text())
    chosen = [m for m in mutations if not words or any(w in m["fault"] + m["file"] for w in words)]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.unfinished")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in chosen:
            file = copy / mutation["file"]
            text = file.read_text()
            if text.count(mutation["guard"]) != 1:
                print(f"STALE    {mutation['fault']}: the guard is not once in {mutation['file']}")
                survived += 1
                continue
            file.write_text(text.replace(mutation["guard"], mutation["without"]))
            said = _what_becomes_of(copy, mutation["test"])
            file.write_text(text)
            survived += said == "SURVIVED"
            print(f"{said:<8} {mutation['fault']}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return int(survived > 0)


def _what_becomes_of(tree: Path, test: list[str]) -> str:
    """Whether a test notices. One that hangs does, or the machine is busy: look which."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hung"
    # Killed by a signal counts; others are no such test, or a test that could not begin.
    return "killed" if done.returncode == 1 or done.returncode < 0 else "SURVIVED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
