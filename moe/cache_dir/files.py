"""Small JSON files in a directory of this user that later processes may read back.

    if (directory := private_directory()) is not None:
        write(directory / "name.json", key, content)
        kept = read(directory / "name.json", key)

A file that is damaged, of another user, of another version or of another key is as good as absent.
A directory that others may write to is not used. What cannot be written, as on a full disk, is not
kept. There are at most `MOST_FILES` of at most `MOST_BYTES`.

A key covers `surroundings`, or what else the content depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import time
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experts.files import read_small
from experts.safetensors_io import write_bytes
from kernels.cpu import choose_kernel
from moe.machine import ROOT, code_digest

VERSION = 2
MOST_FILES, MOST_BYTES = 512, 1 << 20
ENVIRONMENT = "MOE_PROOF_CACHE"
_UNFINISHED, _ABANDONED_S = "*.unfinished", 3600.0
_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "greenlet", "triton")
_VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH"),
    *("PYTORCH", "TRITON_", "CUDA_", "MOE_CPU_KERNEL", "LD_", "GLIBC_TUNABLES"),
)
"""Beginnings of variables that change what libraries compute."""
_OF_THE_MOMENT = ("processor", "cpu MHz", "bogomips", "physical id", "core id", "apicid", "initial")

_logger = logging.getLogger("moe")


class Kept(NamedTuple):
    """The content of a file, and when it was written, in seconds since 1970."""

    content: dict[str, Any]
    time: float

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.time).date().isoformat()


def directory_name() -> Path | None:
    """The directory, which need not exist; None: nothing is kept."""
    stated = os.environ.get(ENVIRONMENT)
    if stated is not None:
        return Path(stated).expanduser() if stated else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "moe-inference" / "proofs"


def private_directory() -> Path | None:
    """The directory, made with mode 0700; None if it cannot be trusted or made."""
    directory = directory_name()
    if directory is None:
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        _logger.info("proofs are not kept: %s", error)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        _logger.warning(
            "proofs are not kept: %s must belong to this user alone (chmod 700)", directory
        )
        return None
    return directory


def read(file: Path, key: str) -> Kept | None:
    """The content that `write` left under this key, if the file is whole and this user's."""
    with suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        if file.stat().st_uid != os.geteuid():
            return None
        entry = json.loads(read_small(file, MOST_BYTES))
        kept = Kept(entry["content"], float(entry["time"]))
        whole = entry["sum"] == digest_of([key, *kept]) and isinstance(kept.content, dict)
        if whole and kept.date and (entry["version"], entry["key"]) == (VERSION, key):
            return kept
    return None


def write(file: Path, key: str, content: dict[str, Any]) -> None:
    """Write a file whole, or leave it as it was: also where others write it at the same time."""
    now = time.time()
    entry = {"version": VERSION, "key": key, "time": now, "content": content}
    data = json.dumps(entry | {"sum": digest_of([key, content, now])}).encode()
    if len(data) > MOST_BYTES:
        return
    try:
        write_bytes(file, data)
        _drop_old(file.parent)
    except OSError as error:
        _logger.info("proofs are not kept: %s", error)


def forget() -> int:
    """Remove all that is kept; returns how many files that were."""
    directory = directory_name()
    if directory is None or not directory.is_dir():
        return 0
    files = [*directory.glob("*.json")]
    for file in (*files, *directory.glob(_UNFINISHED)):
        file.unlink(missing_ok=True)
    return len(files)


def digest_of(data: object) -> str:
    """A digest of what can be written as JSON."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def surroundings() -> dict[str, object]:
    """Our code and kernels, libraries, the processor, threads and variables of this process."""
    kernel, why = choose_kernel()
    return {
        "code": code_digest(),
        "libraries": [sys.version, *((name, _version(name)) for name in _LIBRARIES)],
        "torch": [
            torch.version.git_version,
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        ],
        "processor": [platform.machine(), *_processor(ROOT), len(os.sched_getaffinity(0))],
        "environment": sorted(
            item for item in os.environ.items() if item[0].startswith(_VARIABLES)
        ),
        "kernels": [why, None if kernel is None else _library(Path(kernel.library._name))],
    }


def hardware(device: torch.device) -> object:
    """A GPU: its chip, its driver, and how torch computes there. `surroundings` describe CPUs."""
    if device.type != "cuda":
        return device.type
    chip, driver = torch.cuda.get_device_properties(device), ""
    with suppress(OSError):
        driver = (ROOT / "proc/driver/nvidia/version").read_text()
    return [
        *(chip.name, chip.major, chip.minor, chip.multi_processor_count, chip.total_memory),
        *(driver, torch.version.cuda, torch.backends.cudnn.version()),
        *(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    ]


def _library(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor(root: Path) -> list[str]:
    """The lines of /proc/cpuinfo about the first processor that are the same at each start."""
    try:
        first = (root / "proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if not line.startswith(_OF_THE_MOMENT)]


def _drop_old(directory: Path) -> None:
    """Keep the newest `MOST_FILES`, and nothing that a killed process did not finish."""
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    limit = time.time() - _ABANDONED_S
    left = [file for file in directory.glob(_UNFINISHED) if file.stat().st_mtime < limit]
    for file in (*files[MOST_FILES:], *left):
        file.unlink(missing_ok=True)
