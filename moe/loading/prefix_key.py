"""Names everything that the bits of keys and values depend on: a folder of `memory.prefix_dir`."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import torch

from kernels.cpu.kv import BLOCK
from moe.hooks import methods
from moe.loading.checkpoint import model_files
from moe.machine import code_digest, cpu_maker, instruction_sets
from moe.settings import Profile
from moe.settings.profile import KEYS, value_of

_SETTINGS = ("kernels.", "model.", "routing.", "offload.late", "memory.kv_policy")
_CHECKS = "model.check_finite", "model.context_length", "model.verify"  # change no bit


def prefix_key(model: Path, profile: Profile, device: torch.device, kv_bits: int) -> str:
    """Name of everything that the bits of keys and values depend on: the processors, too, as
    libraries choose their products by instruction sets and maker.

    Args:
        model: its directory.
    """
    facts = {
        "code": [code_digest(), torch.__version__],
        "machine": [platform.machine(), cpu_maker(), *instruction_sets(), _compute_name(device)],
        "files": [[name, _version(model / name)] for name in model_files(model)],
        "settings": settings_of_bits(profile),
        "kv_bits": [kv_bits, BLOCK],
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _version(file: Path) -> object:
    """Return the size and time of a large file, and the content of a JSON file, as those of a GGUF
    model are written anew by each process."""
    if file.suffix == ".json":
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _compute_name(device: torch.device) -> str:
    """The GPU, or what torch uses of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def settings_of_bits(profile: Profile) -> list[str]:
    """The settings that the bits of keys and values depend on."""
    sections = (*_SETTINGS, *(f"methods.{m.name}." for m in methods() if m.changes_answers))
    keys = [key for key in KEYS.leaves if key.startswith(sections) and key not in _CHECKS]
    return [repr(value_of(profile, key)) for key in keys]
