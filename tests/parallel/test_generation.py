"""Two ranks say what one process says, in every mode."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from moe.convert import convert
from moe.profile import load_profile
from moe.settings import ModelSettings
from tests.parallel import generation


def alike(one: Any, other: Any) -> bool:
    """Equal but for the last bits of log probabilities: passes have other rows beside them here."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def store(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole weights, so that experts say what those of the checkpoint say."""
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    return convert(tiny_checkpoint("qwen3_moe"), tmp_path_factory.mktemp("store") / "s", whole)


def test_two_ranks_say_what_one_process_says(
    tiny_checkpoint: Callable[[str], Path], store: Path, launch: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    with launch(2, [generation.__file__, store, out, "expert-parallel"]) as launched:
        one = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), load_profile(generation.SETTINGS))
        alone = generation.run(one)
        assert launched.codes() == [0, 0], launched.everything()
    together = json.loads(out.read_text())
    stats = together.pop("stats")
    slots, moved = together.pop("slots"), together.pop("moved")
    assert together.keys() == alone.keys()
    for case, said in alone.items():
        assert alike(together[case], said), case
    for name, said in moved.items():
        assert alike(said, alone[f"whole {name}"]), name
    assert slots < sum(one._experts.statistics.num_experts)
    first, second = stats["ranks"]
    assert first["pairs"] > 0
    assert second["pairs"] > 0
