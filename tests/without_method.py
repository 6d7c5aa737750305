"""Removes methods from a copy of the tree, and shows that the rest does without them.

    python -m tests.without_method NAME...         each in turn
    python -m tests.without_method                 all, each in turn, then all at once
    python -m tests.without_method NAME --import   only imports every module

A method goes with its folder in moe/methods, its `Method.files`, its keys in configs/default.yaml
and its entries in the pinned lists. The rest must import, type-check, and pass the tests of
structure, of settings and of the other methods. (docs/systems.md names its folder; that is prose.)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe.hooks import methods
from tests.floors import ROOMS, ROOT

METHODS = {method.name: method for method in methods()}
TESTS = (
    *("tests/test_house.py", "tests/test_public_surface.py"),
    *("tests/moe/test_profile.py", "tests/moe/test_profile_sources.py", "tests/methods"),
)
_IMPORT_ALL = f"""
import importlib, pkgutil
for room in {list(ROOMS)}:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def copy_without(names: Sequence[str], folder: Path) -> None:
    """Copy what git does not ignore into an empty folder, without these methods."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in names:
        remove(name, folder)


def remove(name: str, folder: Path) -> None:
    """Take one method out of a tree."""
    shutil.rmtree(folder / "moe" / "methods" / name)
    for file in METHODS[name].files:
        (folder / file).unlink()
    defaults = folder / "configs" / "default.yaml"
    defaults.write_text(without_section(defaults.read_text(), name))
    surface = folder / "tests" / "data" / "public_surface.json"
    pinned = json.loads(surface.read_text())
    pinned["methods"].pop(name)
    surface.write_text(json.dumps(pinned))
    budget = folder / "tests" / "cpu_budget.json"
    seconds = json.loads(budget.read_text())
    left = {file: own for file, own in seconds.items() if file not in METHODS[name].files}
    budget.write_text(json.dumps(left))


def without_section(profile: str, name: str) -> str:
    """The text of a profile without the section ``methods.NAME``."""
    return re.sub(rf"^  {name}:.*\n(?:   +.*\n)*", "", profile, flags=re.MULTILINE)


def check(names: Sequence[str], *, only_import: bool = False) -> None:
    """Raises `subprocess.CalledProcessError` if the rest does not do without these methods."""
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as made:
        copy_without(names, Path(made))
        commands = [["-c", _IMPORT_ALL]]
        if not only_import:
            cache = Path(tempfile.gettempdir()) / f"moe-without-{os.getuid()}"
            commands.append(["-m", "mypy", "--cache-dir", str(cache)])
            # Pages name keys of methods, and a copy is made of a repository only.
            wanted = "not documents_name and not without"
            run = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", wanted]
            commands.append([*run, *TESTS])
        for command in commands:
            subprocess.run([sys.executable, *command], cwd=made, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *METHODS], metavar="NAME")
    parser.add_argument("--import", action="store_true", dest="only_import")
    options = parser.parse_args()
    groups = [[name] for name in options.names or METHODS]
    for names in groups if options.names else [*groups, list(METHODS)]:
        print(f"without {', '.join(names)}", flush=True)
        check(names, only_import=options.only_import)


if __name__ == "__main__":
    main()
