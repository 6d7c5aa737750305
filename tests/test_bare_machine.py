"""What a machine needs to import what runs models, and to try the kernels: few packages.

All others are hidden from a process of its own, as if they were not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = "torch triton transformers numpy safetensors pytest"
_RUN = "test_unused_slots_do_not_matter or test_rows_of_prompts_are_placed"
"""Tests that run; all others of GPU kernels are collected. The second one draws examples."""
_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "HYPOTHESIS_NO_PLUGINS"
_PROGRAM = """
import re, sys
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from packaging.requirements import Requirement

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def needed(names):
    found, left = set(), list(names)
    while left:
        name = plain(left.pop())
        if name not in found:
            found.add(name)
            try:
                wanted = map(Requirement, metadata.requires(name) or [])
            except metadata.PackageNotFoundError:
                continue
            left += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found

kept = needed(sys.argv[1].split())
hidden = {
    name for name, homes in metadata.packages_distributions().items()
    if not kept & set(map(plain, homes))
} - {"moe", "routing", "experts", "offload", "kernels", "configs"}
unwanted = {"deepspeed", "scipy", "llguidance", "fastapi", "greenlet", "hypothesis"}
assert unwanted <= hidden, sorted(hidden)

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in hidden:  # what the tests have in its place may be found
            path = [own for own in sys.path if "site-packages" not in own]
        return super().find_spec(name, path, target)

own = [finder for finder in sys.meta_path if finder.__module__ == "_frozen_importlib"]
sys.meta_path[:] = [*own, Bare]
for name in ("routing", "experts.dispatch", "offload", "kernels.triton.experts", "moe.model",
             "moe.parallel.engine", "moe.engine.runner", "moe.decode.recorded"):
    import_module(name)
from moe.network.lanes import Lane
try:
    Lane(lambda: None).start()
except ValueError as error:
    assert "pip install 'greenlet>=3'" in str(error), error
else:
    raise AssertionError("a lane may sleep without greenlet")
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[]))
"""


@pytest.mark.deep
def test_models_and_kernel_tests_need_few_packages() -> None:
    root = Path(__file__).parents[1]
    tests = sorted(map(str, (root / "tests" / "kernels").glob("test_triton*.py")))
    assert len(tests) > 10
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, PACKAGES, "-k", _RUN, *tests],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, **dict.fromkeys(_NO_PLUGINS, "1"), "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 passed" in done.stdout, done.stdout[-3000:]
