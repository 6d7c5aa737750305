"""What `moe eval` says of the shipped model that writes canvases, and of policies on canvases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe import MoE
from moe.cli import main
from moe.errors import RequestError
from moe.methods.diffusion.evaluate import BEFORE, evaluate_canvases

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/diffusion-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:6000]


@pytest.mark.deep
def test_eval_prices_policies_on_canvases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = ["eval", str(MODEL), "--text", str(tmp_path / "text"), "--tokens", "1280"]
    arguments += ["--set", "lossless=false"]
    policies = '--set=routing.policies=["des_vote:0.25:32", "des_vote:1:32"]'
    assert main([*arguments, policies, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["canvas_tokens"] == 1280 // (BEFORE + 32) * 32
    assert list(found["bits_per_token"]) == ["1", "0.75", "0.5", "0.25"]
    bits = list(found["bits_per_token"].values())
    assert sorted(bits, reverse=True) == bits
    assert bits[0] < 12  # what guessing costs
    few, all_of_them, _ = found["policies"]
    assert few["distinct"] == 6 < few["distinct_without"]
    assert few["kl_bits"] > 0
    assert few["bits_per_byte"] != few["without"]
    assert all_of_them["bits_per_byte"] == all_of_them["without"]
    assert all_of_them["top1_agreement"] == 1
    assert main([*arguments, policies, "--tokens", "640"]) == 0
    assert "des_vote:0.25:32" in capsys.readouterr().out
    assert main([*arguments, "--against", str(MODEL)]) != 0
    assert "--against is not possible" in capsys.readouterr().err


def test_texts_without_a_canvas_for_each_share_are_refused() -> None:
    model = MoE.from_pretrained(MODEL)
    with pytest.raises(RequestError, match=r"300 tokens, and 640 are needed: 128 before each of 4"):
        evaluate_canvases(model, TEXT, 300)
