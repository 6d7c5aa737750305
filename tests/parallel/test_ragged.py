"""A ReLU router on two ranks: tokens that visit any number of experts are served by others.

As a script, what each rank does: ``python test_ragged.py STORE OUT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings
from tests.lab.test_serving import lab_model
from tests.parallel import generation
from tests.parallel.test_generation import alike


def said(model: MoE) -> dict[str, Any]:
    names = ("greedy", "seeded")
    return {name: generation.said(model, generation.PROMPTS, generation.PARAMS[name])
            for name in names}  # fmt: skip


@pytest.mark.deep
def test_two_ranks_serve_any_number_of_experts(launch: Any, tmp_path: Path) -> None:
    lab_model("relu").save_pretrained(tmp_path / "lab")
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store, out = convert(tmp_path / "lab", tmp_path / "store", whole), tmp_path / "out.json"
    with launch(2, [__file__, store, out]) as launched:
        alone = said(MoE.from_pretrained(tmp_path / "lab", generation.SETTINGS))
        assert launched.codes() == [0, 0], launched.everything()
    together = json.loads(out.read_text())
    stats = together.pop("stats")
    for name, completions in alone.items():
        assert alike(together[name], completions)
    for rank in stats["ranks"]:
        assert rank["pairs"] > 0
        assert rank["bytes_out"] > 0


def main() -> None:
    store, out = sys.argv[1:]
    model = MoE.from_pretrained(store, "expert-parallel", **generation.SETTINGS)
    if model.rank:
        model.serve_rank()
    else:
        Path(out).write_text(json.dumps(said(model) | {"stats": model.stats()["parallel"]}))
    model.close()


if __name__ == "__main__":
    main()
