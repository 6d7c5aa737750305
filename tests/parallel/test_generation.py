"""Two ranks say what one process says, in every mode."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from moe import MoE
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from tests.amounts import deep_except
from tests.parallel import generation


def alike(one: Any, other: Any) -> bool:
    """Equal but for the last bits of log probabilities."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def stored(checkpoint: Path, folder: Path, bits: Literal[8, 16]) -> Path:
    """Experts, trunk and head in so many bits."""
    settings = ModelSettings(expert_bits=bits, trunk_bits=bits, head_bits=bits, group_size=32)
    return convert(checkpoint, folder, settings)


@pytest.mark.parametrize("bits", deep_except([8], [16, 8]))
def test_two_ranks_say_what_one_process_says(
    tiny_checkpoint: Callable[[str], Path],
    launch: Any,
    tmp_path: Path,
    bits: Literal[8, 16],
) -> None:
    """To the last bit where planes multiply, which have one order of sums whatever rows there are,
    and prompts are whole. Products of whole weights are torch's, whose last bits depend on the rows
    in a pass, as those of its attention do on where a prompt was cut."""
    store = stored(tiny_checkpoint("qwen3_moe"), tmp_path / "store", bits)
    out = tmp_path / "out.json"
    with launch(2, [generation.__file__, store, out, "expert-parallel"]) as launched:
        one = MoE.from_pretrained(store, load_profile(generation.SETTINGS))
        alone = generation.run(one)
        assert launched.codes() == [0, 0], launched.everything()
    together = json.loads(out.read_text())
    stats = together.pop("stats")
    slots, moved = together.pop("slots"), together.pop("moved")
    assert together.keys() == alone.keys()
    for case, said in alone.items():
        same = operator.eq if bits == 8 and case.startswith("whole") else alike
        assert same(together[case], said), case
        moved_case = moved.get(case.removeprefix("whole "), said)
        assert same(moved_case, said), f"{case}, moved"
    assert slots < sum(one.experts.statistics.num_experts)
    first, second = stats["ranks"]
    assert first["pairs"] > 0
    assert second["pairs"] > 0


@pytest.mark.deep
def test_two_ranks_say_what_one_says_of_looped_layers(
    tiny_checkpoint: Callable[[str], Path], launch: Any, tmp_path: Path
) -> None:
    path, out = tiny_checkpoint("inkling2_loop_text"), tmp_path / "out.json"
    with launch(2, [generation.__file__, path, out, "expert-parallel"]) as launched:
        alone = generation.run(MoE.from_pretrained(path, load_profile(generation.SETTINGS)))
        assert launched.codes() == [0, 0], launched.everything()
    together = json.loads(out.read_text())
    for case, said in alone.items():
        assert alike(together[case], said), case
