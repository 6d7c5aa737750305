"""What `benchmarks.load_memory --store` says: of which processes, in which order."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import load_memory
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings


def test_a_store_and_bare_threads_are_read_in_turn(
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the children in this process, as they are started."""
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(tiny_checkpoint("qwen3_moe"), tmp_path / "store", settings)
    started: list[str] = []

    def in_turn(
        loaders: tuple[str, ...], path: Path, repeats: int
    ) -> dict[str, list[dict[str, float]]]:
        runs: dict[str, list[dict[str, float]]] = {loader: [] for loader in loaders}
        for loader in [*loaders] * repeats:
            started.append(loader)
            command = ["load_memory", "--child", loader, str(path)]
            monkeypatch.setattr(sys, "argv", command)
            load_memory.main()
            runs[loader].append(json.loads(capsys.readouterr().out.splitlines()[-1]))
        return runs

    monkeypatch.setattr(load_memory, "in_turn", in_turn)
    monkeypatch.setattr(sys, "argv", ["load_memory", "--store", str(store), "--repeats", "2"])
    load_memory.main()
    assert started == ["store", "bare", "store", "bare", "resident"]
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["store_bytes"] == sum(f.stat().st_size for f in store.glob("*.safetensors"))
    assert line["reading_ratio"] > 0
    parts = {"planning", "reading", "reading_cpu", "preparing"}
    assert line.keys() >= {f"store_{part}_s" for part in parts} | {"bare_reading_s"}
    assert line.keys() >= {"resident_ratio", "used_ratio"}
