"""Say which build of torch `make` installs, as arguments of pip, and why.

    python torch_build.py VERSION

The default build on x86-64 is for CUDA: several GB of packages that a machine without an NVIDIA GPU
never uses. So such a machine takes the CPU build where an index has it: first the indexes that
pip's own settings name, then PyTorch's. Arguments go to standard output, the reason to standard
error. Imports nothing that is not in Python: `make` runs this before it installs anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from glob import glob
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_GPU_FILES = "/dev/nvidia*", "/proc/driver/nvidia"
_SECONDS = 60  # for an answer of an index; pip tries again by itself otherwise


class Build(NamedTuple):
    arguments: list[str]  # of `pip install`
    reason: str


def nvidia_gpu() -> str:
    """Return what shows that this machine has an NVIDIA GPU; empty if nothing does."""
    found = [path for pattern in _GPU_FILES for path in sorted(glob(pattern))]
    return shutil.which("nvidia-smi") or next(iter(found), "")


def has(requirement: str, *index: str) -> bool:
    """Ask the indexes of pip's settings, or those of these options, for ``torch==VERSION``."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *index]
    bounded = ["--retries", "0", "--timeout", "15", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, *bounded], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    available = re.search("^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return available is not None and requirement in (
        f"torch=={version}" for version in available[1].split(", ")
    )


def choose(version: str) -> Build:
    """Return the build of torch for this machine.

    Args:
        version: of torch, without a build (``2.13.0``).
    """
    default, cpu = f"torch=={version}", f"torch=={version}+cpu"
    if gpu := nvidia_gpu():
        return Build([default], f"{default}, the default build: {gpu} shows an NVIDIA GPU")
    reason = f"{cpu}, the CPU build: this machine has no NVIDIA GPU"
    if has(cpu):
        return Build([cpu], reason)
    if has(cpu, "--index-url", CPU_INDEX):
        return Build([cpu, "--extra-index-url", CPU_INDEX], f"{reason} (from {CPU_INDEX})")
    return Build(
        [default],
        f"{default}, the default build, which may bring several GB for CUDA: this machine has no "
        f"NVIDIA GPU, but neither pip's indexes nor {CPU_INDEX} offered {cpu} within "
        f"{_SECONDS} seconds",
    )


if __name__ == "__main__":
    build = choose(sys.argv[1])
    print(f"torch: {build.reason}; make TORCH=... names another", file=sys.stderr)
    print(*build.arguments)
