"""``moe trace`` end to end on the shipped model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe import MoE
from moe.cli import main
from moe.commands.trace.command import trace_model
from moe.commands.trace.findings import Findings
from moe.commands.trace.report import html, second_weights
from moe.errors import RequestError
from routing.policies.base import Arguments

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:12_000]


@pytest.fixture(scope="module")
def found() -> Findings:
    return trace_model(MoE.from_pretrained(DEMO), TEXT, 3_000, "<b>text</b>")


def test_a_trained_model_is_local(found: Findings) -> None:
    assert found.num_tokens == 3_000
    for layer in found.layers:
        assert sum(layer.load) == 3_000 * 4
        assert layer.distinct[0] == layer.top_k == 4
        assert all(own < law for own, law in zip(layer.distinct[2:6], layer.law[2:6], strict=True))
        assert layer.same_token > 2 * layer.any_tokens
        assert layer.recall["token"] > layer.recall["popular"]
        assert layer.cache_hits == sorted(layer.cache_hits)
        assert layer.overflow[-1] > layer.overflow[0]
    assert found.layers[0].recall["token"] > found.layers[-1].recall["token"]


def test_ratios_are_those_of_a_policy(found: Findings) -> None:
    """Policies take a number for each layer in this form (`PerLayer`)."""
    ratios = Arguments([], "x", "").per_layer(second_weights(found))
    assert len(ratios.values) == len(found.layers)


def test_the_report_holds_everything_and_runs_nothing(found: Findings) -> None:
    page = html(found, {"load": b"image"})
    assert "&lt;b&gt;text&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "data:image/png;base64,aW1hZ2U=" in page
    assert not re.search(r"<script|https?://|\son\w+=", page)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = ["trace", str(DEMO), "--text", str(tmp_path / "text"), "--tokens", "300"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "How far the token determines" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "out/routing.json").read_text())
    assert len(numbers["layers"]) == 6
    assert (tmp_path / "out/load.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in (tmp_path / "out/report.html").read_text()
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["num_tokens"] == 300
    assert shown["layers"][0]["recall"] == {}  # one sequence: nothing to learn from


def test_what_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(DEMO), "--text", str(tmp_path / "none")]) == 2
    assert main(["trace", str(DEMO), "--text", str(DEMO), "--tokens", "0"]) == 2
    assert "--tokens must be at least 1" in capsys.readouterr().err
    with pytest.raises(RequestError, match="the text is empty"):
        trace_model(MoE.from_pretrained(DEMO), "", 10, "text")
    (tmp_path / "text").write_text(TEXT[:500])
    (tmp_path / "file").write_text("")
    arguments = ["trace", str(DEMO), "--text", str(tmp_path / "text")]
    assert main([*arguments, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
