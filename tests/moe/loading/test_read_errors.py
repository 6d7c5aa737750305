"""A disk that fails while a model is loaded: one clear error, nothing served, nothing left open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError
from moe.settings import ModelSettings
from tests.open_files import num_open

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 256, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 64},
    "offload": {"hot_set": False},
}


class FailingDisk:
    """In the place of `os.preadv`: one read of all fails."""

    def __init__(self, failing: int | None = None) -> None:
        self.reads, self._failing, self._read = 0, failing, os.preadv

    def __call__(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        self.reads += 1
        if self.reads - 1 == self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(fd, buffers, offset, flags)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores") / "store"
    return convert(checkpoint, out, ModelSettings(expert_bits=8, group_size=32))


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_any_read_that_fails_ends_the_load(
    request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = request.getfixturevalue(kind)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counted := FailingDisk())
        MoE.from_pretrained(path, SMALL)
    assert counted.reads > 4
    chosen = sorted({0, 1, counted.reads // 3, counted.reads // 2, counted.reads - 1})
    for failing in chosen:
        before = num_open(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", FailingDisk(failing))
            with pytest.raises(CheckpointError, match="Input/output error"):
                MoE.from_pretrained(path, SMALL)
        assert num_open(path) <= before  # what was loaded above may be gone by now
    assert MoE.from_pretrained(path, SMALL).generate([[5, 6]])
