"""A small model and how it routes random text, for budgets and repaired routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.record import record_trace
from moe.commands.convert.convert import convert
from tests.moe.convert.stores import SETTINGS, content


@pytest.fixture(scope="module")
def model(tiny_moe: Callable[[str], MoE]) -> MoE:
    return tiny_moe("qwen3_moe")


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def finished(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a store that was made in one go."""
    return content(convert(path, tmp_path_factory.mktemp("finished") / "store", SETTINGS))


@pytest.fixture(scope="module")
def trace(model: MoE) -> Trace:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (20, 100), generator=generator)
    return record_trace(model.backbone, model.experts, ids.tolist())
