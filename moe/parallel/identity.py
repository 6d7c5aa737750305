"""What ranks must have in common before they serve: settings, versions, code and model files.

Ranks that disagree would wait for each other in different places, or give different answers.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moe.profile import KEYS, Profile, value_of
from offload.hot_set import FILE_NAME

PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
ROOMS = ("moe", "offload", "experts", "routing", "kernels")
ROOT = Path(__file__).parents[2]
SOURCES = (".py", ".cpp", ".h")
OWN_SETTINGS = ("threads",)
"""Settings that may differ from rank to rank."""

Identity = dict[str, str]


def identity(profile: Profile, model: Path) -> Identity:
    """Everything that must be equal, by the name that an error gives it."""
    same: Identity = {"moe": _version("moe-inference"), "python": platform.python_version()}
    same["code"] = code_digest(ROOT)
    same |= {name: _version(name) for name in PACKAGES}
    for key in KEYS.leaves:
        if key not in OWN_SETTINGS:
            same[f"setting {key}"] = repr(value_of(profile, key))
    return same | {f"model file {name}": what for name, what in _files(model).items()}


def differences(identities: Mapping[int, Identity]) -> list[str]:
    """One line for each thing in which ranks differ from rank 0: which rank has what."""
    first = identities[0]
    lines = []
    for rank, other in sorted(identities.items()):
        for name in sorted(first.keys() | other.keys()):
            here, there = first.get(name, "absent"), other.get(name, "absent")
            if here != there:
                lines.append(f"{name}: {here} on rank 0, {there} on rank {rank}")
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def code_digest(root: Path) -> str:
    """Of our own sources, compiled ones too: other kernels give other bits."""
    digest = hashlib.blake2b(digest_size=8)
    for room in ROOMS:
        for file in sorted((root / room).rglob("*")):
            if file.suffix in SOURCES:
                digest.update(str(file.relative_to(root)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(model: Path) -> dict[str, str]:
    """Small files of a model by their contents, large ones by their sizes."""
    found = {}
    for file in sorted(model.iterdir()):
        if file.name == FILE_NAME:
            continue  # of a run, not of the model
        if file.suffix == ".json" and file.stat().st_size < 2**24:
            found[file.name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        elif file.suffix in (".safetensors", ".bin", ".gguf"):
            found[file.name] = f"{file.stat().st_size} bytes"
    return found
