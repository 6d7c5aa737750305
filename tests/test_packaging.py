"""What gets installed, and that transformers works beside it.

transformers takes whatever module is named `kernels` for the Hugging Face distribution of that
name when its version is one of 0.x; ours must not be, however it got onto the path.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version
from transformers.utils import import_utils

ROOT = Path(__file__).parents[1]
ROOMS = [file.parent.name for file in sorted(ROOT.glob("*/__init__.py"))]
ROOMS = [room for room in ROOMS if room not in ("benchmarks", "examples")]

USE_TRANSFORMERS = """
import transformers, torch
import transformers.integrations.hub_kernels
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available(), "our package was taken for the distribution kernels"
config = transformers.Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
    num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)
logits = transformers.Qwen3MoeForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits
import kernels
assert logits.shape == (1, 3, 32)
print(kernels.__file__)
"""


def run_beside(*path: Path) -> Path:
    """Use transformers with these folders on the path; the ``kernels`` package that was found."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE_TRANSFORMERS]
    done = subprocess.run(
        command, env=environ, cwd=sysconfig.get_path("stdlib"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree so that nothing is left in it."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, source / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    subprocess.run([*pip, *options, str(source)], check=True)
    return next(out.glob("moe_inference-*.whl"))


def test_wheel_has_everything_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    here = {
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*")
        if file.suffix in {".py", ".yaml", ".cpp", ".h"} or file.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == here
    assert "configs/default.yaml" in here


def test_transformers_beside_a_plain_checkout() -> None:
    assert run_beside(ROOT) == ROOT / "kernels"


def test_transformers_beside_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert run_beside(tmp_path) == tmp_path / "kernels"


def test_transformers_beside_an_editable_install(wheel: Path, tmp_path: Path) -> None:
    """site-packages has the metadata only; the packages are in the checkout."""
    archive = zipfile.ZipFile(wheel)
    archive.extractall(tmp_path, [n for n in archive.namelist() if ".dist-info/" in n])
    assert run_beside(tmp_path, ROOT) == ROOT / "kernels"


def test_our_version_is_a_calendar_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found
    assert re.fullmatch(r"20\d\d\.(0?[1-9]|1[0-2])\.\d+", found[1])
    assert Version(found[1]) > Version(import_utils.KERNELS_MAX_VERSION)


def test_our_kernels_package_has_no_version_of_its_own() -> None:
    """Without metadata transformers falls back to ``kernels.__version__``."""
    assert not hasattr(importlib.import_module("kernels"), "__version__")


def test_installed_version_is_that_of_pyproject() -> None:
    try:
        installed = metadata.version("moe-inference")
    except metadata.PackageNotFoundError:
        pytest.skip("a plain checkout has no metadata")
    assert f'version = "{installed}"' in (ROOT / "pyproject.toml").read_text()
