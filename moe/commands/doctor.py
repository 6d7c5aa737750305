"""``moe doctor``: what this machine and installation have, what is missing, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from moe.commands import doctor_checks as checks
from moe.commands.console import stdout_console
from moe.commands.doctor_checks import Finding

__all__ = ["Finding", "exit_code", "main", "print_doctor", "run_doctor"]

# The dependencies of pyproject.toml (a test compares them); here because a plain checkout has no
# metadata to read them from.
TORCH, TRANSFORMERS, DEEPSPEED = "torch>=2.11", "transformers>=5.17,<6", "deepspeed>=0.18"
OTHER_LIBRARIES = (
    "tokenizers>=0.22",
    "safetensors>=0.6",
    "huggingface_hub>=1",
    "greenlet>=3",
    "llguidance>=1.9",
    "numpy>=1.26",
    "scipy>=1.12",
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

CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": checks.check_python,
    "torch": partial(checks.check_library, TORCH),
    "transformers": partial(checks.check_library, TRANSFORMERS),
    "deepspeed": partial(checks.check_library, DEEPSPEED, required=False),
    "libraries": partial(checks.check_libraries, OTHER_LIBRARIES),
    "module names": checks.check_module_names,
    "CPU": checks.check_cpu,
    "threads": checks.check_threads,
    "compiler": checks.check_compiler,
    "CPU kernel": checks.check_cpu_kernel,
    "memory": checks.check_memory,
    "disk": checks.check_disk,
    "GPU": checks.check_gpu,
    "triton": checks.check_triton,
    "megablocks": checks.check_megablocks,
    "gguf": checks.check_gguf,
}


def run_doctor() -> list[Finding]:
    """All findings, in the order they are shown. A check that fails becomes a finding itself."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def main() -> int:
    """Print the findings; the exit code of ``moe doctor``."""
    findings = run_doctor()
    print_doctor(findings, stdout_console())
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something is missing without which nothing runs, else 0."""
    return int(any(finding.required and finding.status == "missing" for finding in findings))


def print_doctor(findings: Sequence[Finding], console: Console) -> None:
    """A table of the findings, and a last line that sums them up."""
    columns = [Column(name, overflow="fold") for name in ("what", "status", "found", "what to do")]
    table = Table(*columns, box=None, header_style="bold")
    colours = {"ok": "green", "warning": "yellow", "missing": "red"}
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.name, status, escape(finding.detail), escape(finding.remedy))
    console.print(table)
    absent = [f.name for f in findings if f.required and f.status == "missing"]
    console.print(f"required and missing: {', '.join(absent)}" if absent else "ready to run")


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken installation is what doctor is for
        return Finding(name, "warning", f"could not be checked: {type(error).__name__}: {error}")
