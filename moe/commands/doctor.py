"""``moe doctor``: what this machine and installation have, what is missing, and what to do.

Each check looks at one thing and returns a `Finding`. Slow or risky packages are looked up, not
imported: deepspeed prints and probes on import, and megablocks needs its CUDA extension. This
module needs the standard library only, as it is for installations that lack the rest.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe import machine
from moe.extras import EXTRAS, INSTALL, install_line

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "warning", "missing"]

MIN_PYTHON = (3, 10)
LOW_MEMORY = 4 * 2**30
LOW_DISK = 10 * 2**30
REINSTALL = f"run 'make venv', or install moe again: {INSTALL}"


@dataclass(frozen=True)
class Finding:
    """The finding of one check. ``required``: nothing runs without it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False


PURPOSES = {
    "parallel": "for several ranks",
    "gguf": "to read GGUF files",
    "calibration": "for --target-bits",
    "images": "for images in prompts",
    "plots": "for plots",
    "gpu": "for CUDA",
    "telemetry": "for OpenTelemetry traces",
}
"""The purpose of each extra."""

# The dependencies of pyproject.toml (a test compares them), because a plain checkout has no
# metadata to read them from.
TORCH, TRANSFORMERS = "torch>=2.11", "transformers>=5.17,<6"
OTHER_LIBRARIES = (
    "tokenizers>=0.22",
    "safetensors>=0.6",
    "huggingface_hub>=1",
    "greenlet>=3",
    "llguidance>=1.9",
    "numpy>=1.26",
    "pydantic>=2.9",
    "PyYAML>=6",
    "rich>=14.3",
    "jinja2>=3.1",
    "packaging>=24.2",
    "fastapi>=0.121",
    "starlette>=0.49.1",
    "uvicorn>=0.30",
    "prometheus-client>=0.20",
)


def run_doctor(*, compiles: bool = False) -> list[Finding]:
    """All findings, in the order of the table. A check that raises becomes a finding itself.

    Args:
        compiles: the CPU kernels, if they are not.
    """
    checks = CHECKS | {"CPU kernel": partial(check_cpu_kernel, compiles=compiles)}
    found = [_guarded(name, checks[name]) for name in CHECKS]
    return [*found, *(check() for check in _method_checks())]


def _method_checks() -> Sequence[Callable[[], Finding]]:
    """Checks that methods bring; none without the libraries that declarations need."""
    try:
        from moe.hooks import Hook
    except ModuleNotFoundError:
        return ()
    return Hook[Callable[[], Finding]]("doctor").of_all()


def main(*, compiles: bool = False) -> int:
    """Print the findings; the exit code of ``moe doctor``."""
    findings = run_doctor(compiles=compiles)
    try:
        from moe.commands.console import stdout_console
    except ImportError:
        print_plain(findings)
    else:
        print_doctor(findings, stdout_console())
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something required is missing, else 0."""
    return int(any(finding.required and finding.status == "missing" for finding in findings))


def print_doctor(findings: Sequence[Finding], console: Console) -> None:
    """A table of the findings, and a last line that sums them up."""
    from rich.table import Column, Table
    from rich.text import Text

    columns = [Column(name, overflow="fold") for name in ("what", "status", "found", "what to do")]
    table = Table(*columns, box=None, header_style="bold")
    colours = {"ok": "green", "warning": "yellow", "missing": "red"}
    for finding in findings:
        status = Text(finding.status, colours[finding.status])
        table.add_row(finding.name, status, finding.detail, finding.remedy)
    console.print(table)
    console.print(_sum(findings))


def print_plain(findings: Sequence[Finding]) -> None:
    """The same without the library that draws tables."""
    for finding in findings:
        print(f"{finding.name:<20} {finding.status:<8} {finding.detail}")
        if finding.remedy:
            print(f"{'':<30}{finding.remedy}")
    print(_sum(findings))


def _sum(findings: Sequence[Finding]) -> str:
    absent = [f.name for f in findings if f.required and f.status == "missing"]
    return f"required and missing: {', '.join(absent)}" if absent else "ready to run"


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken installation is what doctor is for
        return Finding(name, "warning", f"could not be checked: {type(error).__name__}: {error}")


def check_python() -> Finding:
    found, wanted = platform.python_version(), ".".join(map(str, MIN_PYTHON))
    if sys.version_info >= MIN_PYTHON:
        return Finding("Python", "ok", found, required=True)
    return Finding("Python", "missing", found, f"install Python {wanted} or newer", required=True)


def check_library(requirement: str, required: bool = True) -> Finding:
    """Is the distribution installed, in a version that satisfies the requirement?"""
    name = re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]
    found = version_of(name)
    if found is None:
        return Finding(name, "missing", "not installed", REINSTALL, required)
    try:
        from packaging.requirements import Requirement
    except ImportError:  # a row of its own
        return Finding(name, "ok", found, required=required)
    wanted = Requirement(requirement).specifier
    if not wanted.contains(found, prereleases=True):
        remedy = f"pip install '{requirement}'"
        return Finding(name, "missing", f"{found}, not {wanted}", remedy, required)
    return Finding(name, "ok", found, required=required)


def check_libraries(requirements: Sequence[str]) -> Finding:
    """One finding for many libraries, which names those that are missing or too old."""
    wrong = [found for found in map(check_library, requirements) if found.status != "ok"]
    if not wrong:
        return Finding("libraries", "ok", f"{len(requirements)} more, as required", required=True)
    detail = "; ".join(f"{finding.name}: {finding.detail}" for finding in wrong)
    return Finding("libraries", "missing", detail, REINSTALL, required=True)


def check_cpu() -> Finding:
    found = machine.instruction_sets()
    detail = f"{platform.machine()}: {', '.join(found) or 'no vector extension we know'}"
    if found:
        return Finding("CPU", "ok", detail)
    return Finding("CPU", "warning", detail, "the portable kernels run, several times slower")


def check_threads() -> Finding:
    import torch

    threads, cpus, quota = torch.get_num_threads(), machine.usable_cpus(), machine.cpu_quota()
    limit = "" if quota is None else f", limited to {quota:g} CPUs' time by the control group"
    detail = f"{threads} on {cpus} usable CPUs{limit}"
    most = cpus if quota is None else min(cpus, max(1, int(quota)))
    if threads > most:
        return Finding("threads", "warning", detail, f"slower than --set threads={most}")
    if (nodes := len(machine.memory_nodes())) > 1:
        ranks = f"deepspeed --num_gpus {nodes} --module moe serve MODEL --profile expert-parallel"
        remedy = f"one process reads half of its memory or more from afar; a rank a node: {ranks}"
        return Finding("threads", "warning", f"{detail}, on {nodes} memory nodes", remedy)
    return Finding("threads", "ok", detail)


def check_compiler() -> Finding:
    from kernels.cpu.build import bundled_library

    if bundled_library():
        return Finding("compiler", "ok", "not needed: this wheel has compiled kernels")
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for command in map(shlex.split, candidates):
        if command and shutil.which(command[0]):
            asked = [*command, "--version"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
            if done.returncode == 0:
                return Finding(
                    "compiler", "ok", f"{shlex.join(command)}: {done.stdout.splitlines()[0]}"
                )
    remedy = "install g++ or clang++; until then the reference kernel runs, slowly"
    return Finding("compiler", "missing", "no C++ compiler on the path", remedy)


def check_cpu_kernel(*, compiles: bool = False) -> Finding:
    import kernels
    from kernels.cpu.build import is_built

    if not compiles and not is_built():
        detail = "not compiled yet: the first run does it, which takes a few minutes"
        return Finding("CPU kernel", "ok", detail, "moe doctor --compile does it now")
    backend = kernels.backend_status()
    if backend["name"] == "native":
        return Finding("CPU kernel", "ok", f"native: {backend['reason']}")
    remedy = "the reference kernel runs, slowly; resolve the reason given"
    return Finding("CPU kernel", "warning", f"{backend['name']}: {backend['reason']}", remedy)


def check_memory() -> Finding:
    total, free, limit = machine.memory_total(), machine.memory_available(), machine.memory_limit()
    if total is None or free is None:
        return Finding("memory", "warning", "cannot be read on this system")
    limited = " (the control group's limit)" if total == limit else ""
    detail = f"{_gib(total)}{limited}, {_gib(free)} available"
    if free < LOW_MEMORY:
        return Finding("memory", "warning", detail, "close programs, or choose a small model")
    return Finding("memory", "ok", detail)


def check_disk() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{_gib(free)} free in {cache}"
    if free < LOW_DISK:
        return Finding("disk", "warning", detail, "free some, or point HF_HOME at a larger disk")
    return Finding("disk", "ok", detail)


def check_gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", "ok", ", ".join(f"{d.name} {_gib(d.total_memory)}" for d in devices))
    if Path("/proc/driver/nvidia").exists():
        detail = f"a driver is there, but torch {torch.__version__} does not see a GPU"
        return Finding("GPU", "warning", detail, "install a CUDA build of torch for this driver")
    return Finding("GPU", "missing", "none seen by torch", "optional: everything runs on the CPU")


def check_extra(extra: str) -> Finding:
    """Are the packages of an extra installed, in the versions that it asks for?"""
    name = f"extra {extra}"
    found = [check_library(requirement, required=False) for requirement in EXTRAS[extra]]
    wrong = [one for one in found if one.status != "ok"]
    detail = "; ".join(f"{one.name}: {one.detail}" for one in wrong or found)
    if not wrong:
        return Finding(name, "ok", detail)
    return Finding(name, "missing", detail, f"optional, {PURPOSES[extra]}: {install_line(extra)}")


def check_module_names() -> Finding:
    """transformers imports a distribution named kernels by the name of our own package."""
    found = version_of("kernels")
    if found:
        detail = f"the distribution kernels {found} has the name of our package"
        return Finding("module names", "warning", detail, "pip uninstall kernels")
    return Finding("module names", "ok", "no other distribution has the name of our packages")


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None: it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": check_python,
    "torch": partial(check_library, TORCH),
    "transformers": partial(check_library, TRANSFORMERS),
    "libraries": partial(check_libraries, OTHER_LIBRARIES),
    "module names": check_module_names,
    "CPU": check_cpu,
    "threads": check_threads,
    "compiler": check_compiler,
    "CPU kernel": check_cpu_kernel,
    "memory": check_memory,
    "disk": check_disk,
    "GPU": check_gpu,
    **{f"extra {extra}": partial(check_extra, extra) for extra in EXTRAS},
}
