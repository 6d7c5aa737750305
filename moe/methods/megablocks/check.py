"""The line of ``moe doctor`` about MegaBlocks; looks the package up without importing it."""

from __future__ import annotations

from importlib import util

from moe.commands.doctor import Finding, version_of
from moe.methods.megablocks import INSTALL


def check_megablocks() -> Finding:
    found = version_of("megablocks")
    if found is None:
        return Finding("megablocks", "missing", "not installed", f"optional, {INSTALL}")
    if util.find_spec("megablocks_ops") is None:
        detail = f"{found} without its CUDA extension megablocks_ops: not usable"
        return Finding("megablocks", "warning", detail, INSTALL)
    return Finding("megablocks", "ok", found)
