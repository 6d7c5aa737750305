"""``moe bench`` measures prompts, decoding, and decoding with drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe.cli import main
from moe.commands import bench
from tests.amounts import deep_except

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


@pytest.mark.deep
def test_stages_say_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "model.expert_bits=8", "--set", "speculation.mode=off"]
    assert main(["bench", DEMO, "--stages", "--json", *settings, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_second"] > 1e8
    assert list(found["stages"]) == ["prompt of 24", "decode 1", "decode 4"]
    for stages in found["stages"].values():
        whole = stages.pop("all")
        assert sum(stage["ms"] for stage in stages.values()) == pytest.approx(whole["ms"])
        assert all(stage["ms"] >= 0 for stage in stages.values())
        assert {"expert_first", "expert_second", "between"} <= stages.keys()
    one, four = found["stages"]["decode 1"], found["stages"]["decode 4"]
    assert one["expert_first"]["bytes"] < four["expert_first"]["bytes"]
    assert one["head"]["bytes"] == four["head"]["bytes"] > 0
    assert main(["bench", DEMO, "--stages", *settings, *SMALL]) == 0
    assert "decode 4: a step, by stage; memory reads" in capsys.readouterr().out


def test_a_prompt_longer_than_the_text_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.py").write_text("import argparse\n")
    monkeypatch.setattr(bench, "some_text", SimpleNamespace(__file__=tmp_path / "text.py"))
    read: list[int] = []

    def reads(_: object, prompt: list[int]) -> bench._Run:
        read.append(len(prompt))
        return bench._Run(1, 1.0)

    monkeypatch.setattr(bench, "_read", reads)
    monkeypatch.setattr(bench, "_decode", lambda *_, **__: bench._Run(1, 1.0))
    assert main(["bench", DEMO, "--json", "--prompt-tokens", "300"]) == 0
    assert read == [json.loads(capsys.readouterr().out)["prompt"]["tokens"]] * 3 == [300] * 3


@pytest.mark.parametrize("mode", deep_except(["ngram"], ["ngram", "auto"]))
def test_the_table_says_what_drafts_came_to(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", f"speculation.mode={mode}", "--set", "model.expert_bits=8"]
    assert main(["bench", DEMO, *SMALL, *settings, "--new-tokens", "40"]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert re.search(r"[1-5]\.\d\d tokens a verification; steps by drafted tokens 0: \d+", out)
    if mode == "ngram":
        assert re.search(r"ngram: \d+ drafts, accepted by position (0|1)\.\d\d", out)
    assert ("gain by its own account: " in out) is (mode == "auto")


def test_a_profile_without_drafts_stays_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", DEMO, "--set", "speculation.mode=off", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "decode 4" in out
    assert "speculation.mode is off" in out


def test_no_more_sequences_than_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--json", "--set", "engine.max_batch_size=2", "--set", "speculation.mode=off"]
    assert main(["bench", DEMO, *settings, *SMALL]) == 0
    assert [row["batch"] for row in json.loads(capsys.readouterr().out)["decode"]] == [1]


def test_a_pool_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "memory.kv_tokens=150", "--set", "speculation.mode=off"]
    assert main(["bench", DEMO, *SMALL, *settings]) != 0
    assert "4 sequences of 64 + 8 tokens never run at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens is 0 and --new-tokens 64; at least 1"),
        (["--new-tokens", "1"], "--prompt-tokens is 512 and --new-tokens 1; at least 1"),
        (["--new-tokens", "9999"], "--new-tokens is 9999, behind a prompt of 64, and the context"),
    ],
)
def test_sizes_that_cannot_be_timed_are_refused(
    sizes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", DEMO, *sizes, "--set", "speculation.mode=off"]) == 2
    assert message in capsys.readouterr().err
