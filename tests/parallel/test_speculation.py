"""Ranks that draft, each with the experts it holds, say what one process says without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from tests.parallel import generation
from tests.parallel.test_generation import alike

PROFILE = """
parallel: {enabled: true}
speculation: {mode: %s, max_depth: 3, bits: 4}
"""


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["elastic", "ngram"])
def test_ranks_that_draft_say_the_same(
    mode: str, tiny_checkpoint: Callable[[str], Path], launch: Any, tmp_path: Path
) -> None:
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(tiny_checkpoint("qwen3_moe"), tmp_path / "store", settings)
    profile, out = tmp_path / "profile.yaml", tmp_path / "out.json"
    profile.write_text(PROFILE % mode)
    with launch(2, [generation.__file__, store, out, profile]) as launched:
        alone = generation.run(MoE.from_pretrained(store, load_profile(generation.SETTINGS)))
        assert launched.codes() == [0, 0], launched.everything()
    together = json.loads(out.read_text())
    assert any(map(int, together["stats"]["speculation"]["depths"]))  # rank 0 has drafted
    for case, said in alone.items():
        assert alike(together[case], said), case
