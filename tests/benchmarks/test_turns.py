"""What `benchmarks.turns` counts from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.turns import ANSWER, MESSAGE, measure
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings


def test_no_turn_reads_more_experts_than_its_new_tokens_need(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bits = ModelSettings(expert_bits=8)
    store = convert(tiny_checkpoint("qwen3_moe"), tmp_path / "store", bits)
    rows = measure(store, 96, 2, residency=0.5)
    for row in rows:
        assert 0 < row["from disk"] <= row["needed"]
        assert row["of needed"] == round(row["from disk"] / row["needed"], 3)
        assert row["MB"] > 0
    found = {(row["prompt"], row["cache"]): row["read"] for row in rows}
    assert found["turn 2", "none"] == 96 + ANSWER + MESSAGE
    assert found["turn 2", "prefix cache"] <= ANSWER + MESSAGE + 64
