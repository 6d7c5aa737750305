"""``moe bench`` measures prompts, decoding, and decoding with drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe.cli import main

DEMO = str(Path("examples/demo-model").resolve())
SMALL = ["--prompt-tokens", "24", "--new-tokens", "8", "--set", "memory.kv_tokens=1024"]


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", DEMO, "--json", "--set", "model.expert_bits=8", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"]["tokens"] == 24
    assert found["prompt"]["tokens_per_second"] > 0
    assert [row["batch"] for row in found["decode"]] == [1, 4]
    assert all(row["gain"] > 0 for row in found["decode"])
    assert found["speculation"]["enabled"]
    assert found["speculation"]["figures"]["tokens"] > 0


def test_a_profile_without_drafts_stays_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", DEMO, "--set", "speculation.mode=off", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "decode 4" in out
    assert "speculation.mode is off" in out
