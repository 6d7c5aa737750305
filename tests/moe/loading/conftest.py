"""A saved tiny model, and copies of it with tensors changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor


@pytest.fixture(scope="session")
def saved(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture
def edited(saved: Path, tmp_path: Path) -> Callable[[dict[str, Tensor | None]], Path]:
    """A copy of the saved model with some tensors replaced, added, or (None) removed."""

    def edit(changes: dict[str, Tensor | None]) -> Path:
        tensors = load_file(saved / "model.safetensors") | changes
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
        return tmp_path

    return edit
