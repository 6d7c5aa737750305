"""How stores are made here, and what is in them."""

from __future__ import annotations

from pathlib import Path

from moe.settings import ModelSettings

SETTINGS = ModelSettings(group_size=32)


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}
