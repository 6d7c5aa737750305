"""Scores of a text, against what they are by definition."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from kernels import QuantizedExperts
from moe import MoE
from moe.cli import main
from moe.commands.evaluate.command import evaluate
from moe.commands.evaluate.scoring import WINDOW, Score, read, read_text, windows_of
from moe.errors import RequestError

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:2500]


@pytest.fixture(scope="module")
def demo() -> MoE:
    return MoE.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def coarse() -> MoE:
    # Keys and values as the other has them, so that only experts differ.
    return MoE.from_pretrained(DEMO, model={"expert_bits": 2}, memory={"kv_bits": 32})


def test_each_token_but_the_first_is_predicted_once(demo: MoE) -> None:
    text = TEXT * 2
    ids, windows = demo.codec.encode(text), windows_of(demo, text)
    assert max(map(len, windows)) == WINDOW
    assert len(windows) > 1
    assert [token for window in windows for token in window[1:]] == ids[1:]
    assert sum(map(len, windows_of(demo, text, tokens=20))) == 20


def test_a_text_is_what_its_file_has(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"a\r\nb\rc\n")
    assert read_text(file).encode() == file.read_bytes()


def test_bits_per_byte_and_perplexity(demo: MoE) -> None:
    quality = evaluate(demo, TEXT, tokens=300)
    ids = demo.codec.encode(TEXT)[:300]
    logprobs = demo.logits(ids).log_softmax(-1)
    nats = -sum(float(logprobs[at, token]) for at, token in enumerate(ids[1:]))
    size = len(demo.codec.decode(ids).encode())
    assert (quality.tokens, quality.num_bytes) == (300, size)
    assert quality.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(nats / 299), rel=1e-5)
    assert quality.difference is None


def test_a_model_does_not_differ_from_itself(demo: MoE) -> None:
    found = evaluate(demo, TEXT, tokens=200, original=demo).difference
    assert found is not None
    assert (found.kl, found.agreement) == (0.0, 1.0)
    assert found.routing == (1.0,) * 6


def test_differences(demo: MoE, coarse: MoE) -> None:
    ids = demo.codec.encode(TEXT)[:200]
    found = evaluate(coarse, TEXT, tokens=200, original=demo).difference
    assert found is not None
    own, other = (model.logits(ids).double().log_softmax(-1) for model in (demo, coarse))
    kl = (own.exp() * (own - other)).sum(-1).mean() / math.log(2)
    assert found.kl == pytest.approx(float(kl), rel=1e-3)
    same = (own.argmax(-1) == other.argmax(-1)).double().mean()
    assert found.agreement == pytest.approx(float(same))
    assert found.routing[0] == 1.0  # experts do not change their own layer's routing
    assert all(0.5 < share < 1 for share in found.routing[1:])


def test_one_layer_may_be_replaced(demo: MoE, coarse: MoE) -> None:
    ids, layers = demo.codec.encode(TEXT)[:100], coarse.experts.layers
    coarser = {i: layer for i, layer in enumerate(layers) if isinstance(layer, QuantizedExperts)}
    whole, one = read(demo, ids), read(demo, ids, {2: coarser[2]})
    every = read(demo, ids, coarser)
    assert torch.equal(one.experts_LTK[:3], whole.experts_LTK[:3])
    assert not torch.equal(one.logprobs_TV, whole.logprobs_TV)
    torch.testing.assert_close(every.logprobs_TV, read(coarse, ids).logprobs_TV)
    score = Score()
    score.add(one, whole)
    assert 0 < score.difference().kl < 0.1


def test_what_cannot_be_evaluated(demo: MoE, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fewer than two tokens"):
        evaluate(demo, "a")
    with pytest.raises(RequestError, match="fewer than two tokens"):
        evaluate(demo, "")
    short = MoE.from_pretrained(DEMO, {"model": {"context_length": 1}})
    with pytest.raises(RequestError, match=r"raise model\.context_length"):
        evaluate(short, TEXT)
    assert main(["eval", str(DEMO), "--text", str(tmp_path / "none")]) == 2
    assert main(["eval", str(DEMO), "--text", str(DEMO), "--tokens", "1"]) == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = ["eval", str(DEMO), "--text", str(tmp_path / "text"), "--tokens", "100"]
    assert main([*arguments, "--against", str(DEMO), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 100
    assert found["kl_bits"] == 0.0
    assert main(arguments) == 0
    assert "bits per byte" in capsys.readouterr().out
