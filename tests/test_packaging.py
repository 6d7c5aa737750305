"""What gets installed, and that transformers works beside it.

transformers takes whatever module is named `kernels` for the Hugging Face distribution of that
name when its version is one of 0.x; ours must not be, however it got onto the path.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
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

from kernels.cpu.compiler import VARIANTS
from moe.extras import EXTRAS

ROOT = Path(__file__).parents[1]
ROOMS = [file.parent.name for file in sorted(ROOT.glob("*/__init__.py"))]
ROOMS = [room for room in ROOMS if room not in ("benchmarks", "examples", "lab")]
PAGE = {".html", ".js", ".mjs", ".css", ".svg", ".md"}

ASK_TRANSFORMERS = """
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available(), "our package was taken for the distribution kernels"
import importlib.util
print(importlib.util.find_spec("kernels").origin)
"""
USE_TRANSFORMERS = """
import transformers, torch
import transformers.integrations.hub_kernels
config = transformers.Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
    num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)
logits = transformers.Qwen3MoeForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 32)
"""


def run_beside(*path: Path, script: str = ASK_TRANSFORMERS) -> Path:
    """Use transformers with these folders on the path; the ``kernels`` package that was found."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environ, cwd=sysconfig.get_path("stdlib"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, so that nothing is left in the tree."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, source / room, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without compiled kernels, which works everywhere."""
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
        if file.suffix in {".py", ".yaml", ".cpp", ".h"} | PAGE
        or file.name in ("py.typed", "LICENSE")
    }
    assert {name for name in names if ".dist-info/" not in name} == here
    assert "configs/default.yaml" in here


def test_transformers_beside_a_plain_checkout() -> None:
    assert run_beside(ROOT) == ROOT / "kernels"


def test_transformers_beside_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = USE_TRANSFORMERS + ASK_TRANSFORMERS
    assert run_beside(tmp_path, script=script) == tmp_path / "kernels"


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


COMPILE_NOTHING = """
import sys
sys.argv = ["setup.py", "-q", "bdist_wheel", "--compiled", "--dist-dir", sys.argv[1]]
import importlib.util
plain = importlib.util.spec_from_file_location
def stub(name, path):
    spec = plain(name, path)
    load = spec.loader.exec_module
    def exec_module(module):
        load(module)
        module.compile_library = lambda compiler, target, library, link: library.write_text(
            " ".join((*target, *link)))
    spec.loader.exec_module = exec_module
    return spec
importlib.util.spec_from_file_location = stub
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""


def test_a_compiled_wheel_has_a_library_for_each_kind_of_cpu(
    wheel: Path, source: Path, tmp_path: Path
) -> None:
    """Beside what a plain one has; the compiler itself is left out."""
    command = [sys.executable, "-c", COMPILE_NOTHING, str(tmp_path)]
    subprocess.run(command, check=True, cwd=source, capture_output=True)
    (compiled,) = tmp_path.iterdir()
    machine = platform.machine()
    assert compiled.name.endswith(f"-py3-none-linux_{machine}.whl")
    archive = zipfile.ZipFile(compiled)
    more = set(archive.namelist()) - set(zipfile.ZipFile(wheel).namelist())
    assert more == {f"kernels/cpu/lib/{variant.name}.so" for variant in VARIANTS[machine]}
    for variant in VARIANTS[machine]:
        flags = archive.read(f"kernels/cpu/lib/{variant.name}.so").decode().split()
        assert flags == [*variant.flags, "-fno-openmp", "-pthread", "-s"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_containers_run_as_a_user_with_a_check_and_a_volume(target: str) -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)$(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    assert list(stages)[-1] == "cpu"  # what `docker build .` makes
    lines = [line for line in (stages["base"] + stages[target]).splitlines() if line.strip()]
    assert lines[-1] == "USER 10001"
    assert "VOLUME /models" in lines
    (check,) = re.findall(r"HEALTHCHECK .*?CMD (\[.*\])", "\n".join(lines))
    assert json.loads(check)[:2] == ["python", "-c"]
    assert "/health" in json.loads(check)[2]


def test_the_image_is_built_from_all_that_the_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    taken = {line[1:] for line in lines if line.startswith("!")}
    files = {"LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.py"}
    assert "*" in lines
    assert taken == files | ({*ROOMS} - {"tests"})


WITHOUT_EXTRAS = """
import sys
from moe.extras import EXTRAS
for requirement in {one for extra in EXTRAS.values() for one in extra}:
    name = requirement.partition(">")[0].replace("-", ".")
    if name != "transformers":
        sys.modules[name] = None
from moe.cli import main
model, store = "examples/demo-model", sys.argv[1]
assert main(["generate", model, "--prompt", "def", "--max-new-tokens", "3", "--json"]) == 0
assert "fastapi" not in sys.modules  # generate starts without the server
import moe.server.serve, moe.commands.chat
assert main(["plan", model, "--json"]) == 0
assert main(["convert", model, store]) == 0
assert main(["convert", model, store + "-2", "--target-bits", "3"]) == 2
assert main(["inspect", store, "--image", store + ".png"]) == 2
"""


@pytest.mark.deep
def test_the_base_installation_runs_models(tmp_path: Path) -> None:
    """Without any package of an extra: what needs one says which."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path / "store")]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--image needs matplotlib: pip install 'matplotlib>=3.9'" in done.stderr


def test_the_extras_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lists = dict(re.findall(r"^([a-z]+) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL))
    listed = {extra: tuple(re.findall(r'"(.+?)"', lists[extra])) for extra in EXTRAS}
    assert listed == EXTRAS
    base = set(re.findall(r'"([a-z_]+)', lists["dependencies"]))
    optional = {one.partition(">")[0] for requirements in EXTRAS.values() for one in requirements}
    assert base & optional == {"transformers"}


def test_nobody_is_told_to_install_a_name_that_is_not_ours() -> None:
    """An index gives whatever somebody registered under it."""
    patterns = ["*.md", "docs/*.md", "Makefile", "pyproject.toml"]
    patterns += [f"{room}/**/*.py" for room in (*ROOMS, "benchmarks", "examples", "lab", "tests")]
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for pattern in patterns
        for file in ROOT.glob(pattern)
        if file.name != Path(__file__).name
        for line in file.read_text().splitlines()
        if re.search(r"pip3? install|uvx? |pipx", line) and "moe-inference" in line
    ]
    assert not found
