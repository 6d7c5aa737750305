"""``parallel.on_rank_loss: continue``: the others go on, and nothing that is said changes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from moe.settings.profile import load_profile
from tests.parallel import losing
from tests.parallel.generation import SETTINGS


@pytest.mark.deep
@pytest.mark.parametrize("device", [False, True])
def test_sequences_of_lost_ranks_are_read_again(
    tiny_checkpoint: Callable[[str], Path], launch: Any, tmp_path: Path, device: bool
) -> None:
    """Also where rows travel as between GPUs (`DeviceDispatcher`, over gloo in place of NCCL)."""
    planned = ({"rank": "012", "kind": "device"},) if device else ()
    path, out = tiny_checkpoint("qwen3_moe"), tmp_path / "out.json"
    with launch(3, [losing.__file__, path, out], *planned) as launched:
        alone = losing.say(MoE.from_pretrained(path, load_profile(SETTINGS)))
        codes = launched.codes()
        assert codes == [0, -signal.SIGKILL, -signal.SIGKILL], launched.everything()
        assert device == ("DeviceDispatcher" in launched.out(0))
    found = json.loads(out.read_text())
    assert len(found["said"]) == 5
    for said in found["said"]:
        assert said == alone
    status = found["status"]
    assert status["ranks"] == [0]
    assert status["epoch"] == 2
    assert status["dispatch"]["name"] == "local"
    assert "has ended" in status["lost"]["2"]
    assert "has not been heard of" in status["lost"]["1"]
