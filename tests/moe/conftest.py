"""What tests of models have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe.convert.convert import convert
from moe.settings import ModelSettings


@pytest.fixture(scope="session")
def store(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a store of 8 bits; tests share it and leave it as it is."""
    out = tmp_path_factory.mktemp("stores") / "store"
    return convert(tiny_checkpoint("qwen3_moe"), out, ModelSettings(expert_bits=8, group_size=32))
