"""doctor: what it finds, and that it never fails."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from moe import machine
from moe.commands import doctor
from moe.commands import doctor as doctor_checks
from moe.commands.doctor import Finding, exit_code, print_doctor, run_doctor
from moe.extras import EXTRAS, install_line

ROOT = Path(__file__).parents[3]


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.backend_status", lambda: {"name": "native", "reason": "built"})


def shown(findings: list[Finding], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    print_doctor(findings, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_long_path_is_shown_to_its_end_on_a_narrow_terminal() -> None:
    text = shown([Finding("disk", "ok", "1 GiB free in /home/" + "x" * 90 + "/hub")], width=60)
    assert text.count("x") == 90
    assert "…" not in text


@pytest.mark.usefixtures("no_build")
def test_this_machine_is_fit() -> None:
    findings = run_doctor()
    assert [finding.name for finding in findings][: len(doctor.CHECKS)] == list(doctor.CHECKS)
    assert exit_code(findings) == 0
    for finding in findings:
        assert finding.detail
        assert finding.status == "ok" or finding.remedy, finding
    assert "ready to run" in shown(findings)
    assert doctor.main() == 0


def test_the_requirements_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed
    wanted = [doctor.TORCH, doctor.TRANSFORMERS, *doctor.OTHER_LIBRARIES]
    assert re.findall(r'"(.+)"', listed[1]) == wanted
    python = ".".join(map(str, doctor_checks.MIN_PYTHON))
    assert f'requires-python = ">={python}"' in text


@pytest.mark.parametrize(
    ("requirement", "detail", "remedy"),
    [
        ("surely-not-installed>=1", "not installed", doctor_checks.REINSTALL),
        (
            "transformers>=5.17,<5.18",
            ", not <5.18,>=5.17",
            "pip install 'transformers>=5.17,<5.18'",
        ),
    ],
)
def test_a_library_that_does_not_fit(requirement: str, detail: str, remedy: str) -> None:
    found = doctor_checks.check_library(requirement)
    assert (found.status, found.remedy, found.required) == ("missing", remedy, True)
    assert found.detail.endswith(detail)
    assert exit_code([found]) == 1
    assert exit_code([doctor_checks.check_library(requirement, required=False)]) == 0
    together = doctor_checks.check_libraries(["numpy", requirement])
    assert (together.status, together.required) == ("missing", True)
    assert "numpy" not in together.detail


def test_versions_are_compared_as_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version_of", lambda name: "5.100.0")
    assert doctor_checks.check_library("transformers>=5.17,<6").status == "ok"


def test_a_failing_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", {"disk": fail})
    detail = "could not be checked: OSError: no such device"
    assert run_doctor()[:1] == [Finding("disk", "warning", detail)]


def test_the_table_shows_brackets_as_they_are() -> None:
    finding = Finding("torch", "missing", "[none]", "pip install 'x[gpu]'", required=True)
    text = shown([finding])
    assert "[none]" in text
    assert "pip install 'x[gpu]'" in text
    assert "required and missing: torch" in text


def test_every_extra_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages that it lacks, and the line that installs them."""
    assert doctor.PURPOSES.keys() == EXTRAS.keys()
    for version, status in (("999", "ok"), ("0.0.1", "missing"), (None, "missing")):
        monkeypatch.setattr(doctor_checks, "version_of", lambda _, version=version: version)
        for extra, requirements in EXTRAS.items():
            found = doctor.CHECKS[f"extra {extra}"]()
            assert (found.status, found.required) == (status, False)
            assert all(Requirement(one).name in found.detail for one in requirements)
            assert found.remedy.endswith(install_line(extra) if status == "missing" else "")


def test_the_name_of_our_package_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version_of", lambda name: "0.18.2")
    found = doctor_checks.check_module_names()
    assert (found.status, found.remedy) == ("warning", "pip uninstall kernels")
    assert "the distribution kernels 0.18.2" in found.detail


def test_a_reference_kernel_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"name": "reference", "reason": "no C++ compiler found"}
    monkeypatch.setattr("kernels.backend_status", lambda: status)
    found = doctor_checks.check_cpu_kernel()
    assert (found.status, found.detail) == ("warning", "reference: no C++ compiler found")


def test_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho g++ 12\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor_checks.check_compiler() == Finding("compiler", "ok", "c++: g++ 12")
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor_checks.check_compiler().status == "missing"


def test_more_threads_than_granted_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.5)
    found = doctor_checks.check_threads()
    assert (found.status, found.remedy) == ("warning", "slower than --set threads=2")
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    assert doctor_checks.check_threads() == Finding("threads", "ok", "8 on 8 usable CPUs")
    monkeypatch.setattr(machine, "memory_nodes", lambda: [{0, 1, 2, 3}, {4, 5, 6, 7}])
    found = doctor_checks.check_threads()
    assert (found.status, found.detail) == ("warning", "8 on 8 usable CPUs, on 2 memory nodes")
    assert "--num_gpus 2 " in found.remedy


def test_little_disk_and_memory_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "LOW_DISK", 2**60)
    monkeypatch.setattr(doctor_checks, "LOW_MEMORY", 2**60)
    assert doctor_checks.check_disk().status == "warning"
    assert doctor_checks.check_memory().status == "warning"


def test_doctor_does_not_import_what_it_looks_up() -> None:
    heavy = "{'torch', 'transformers', 'deepspeed'}"
    code = f"import sys, moe.commands.doctor; print(*{heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""


def test_nothing_is_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail() -> dict[str, str]:
        raise AssertionError("compiled")

    monkeypatch.setattr("kernels.backend_status", fail)
    found = doctor_checks.check_cpu_kernel()
    assert (found.status, found.remedy) == ("ok", "moe doctor --compile does it now")
    with pytest.raises(AssertionError, match="compiled"):
        doctor_checks.check_cpu_kernel(compiles=True)
    assert list(tmp_path.iterdir()) == []


def test_without_a_single_library_it_says_what_is_missing() -> None:
    """-S: this Python has its standard library only."""
    bare = [sys.executable, "-S", "-m", "moe", "doctor"]
    done = subprocess.run(bare, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "required and missing: torch, transformers, libraries"
    assert any(line.startswith("Python               ok ") for line in lines)
    assert re.search(r"torch +missing  not installed\n +run 'make venv', or install", done.stdout)
