"""What is read off the passes of a model that writes blocks."""

from __future__ import annotations

import json

import pytest
import torch

from lab.diffusion import fewer_passes as chance
from moe import MoE
from tests.methods.diffusion.test_writer import PROMPTS, SIZES, make_model

pytestmark = pytest.mark.deep


PASSES = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MoE:
    path = make_model(tmp_path_factory.mktemp("blocks") / "model", **SIZES[0])
    settings = path / "generation_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"max_denoising_steps": PASSES})
    )
    return MoE.from_pretrained(path)


def test_passes_are_watched_and_replayed(model: MoE) -> None:
    blocks = chance.watch(model, PROMPTS)
    (written,) = model.generate(PROMPTS[0], chance.SamplingParams(max_new_tokens=5, seed=0))
    assert blocks[0].final.tolist()[: len(written.tokens)] == written.token_ids
    assert [len(block.passes) for block in blocks] == [PASSES - 1] * len(PROMPTS)
    for row in chance.drafts(model, blocks):
        assert 0 <= row["canvases right"] <= row["tokens right"] <= 1
        assert 2 / PASSES <= row["passes"] <= 1
    with torch.inference_mode():  # a pass that reads what it did read makes what it did make
        one, after = blocks[0].passes[:2]
        assert torch.equal(chance._reading_of(model, one, one), after.canvas)


def test_tokens_settle_and_anchors_are_counted() -> None:
    def said(tokens: list[int], likely: list[float]) -> chance.Pass:
        probabilities = torch.zeros(1, 6, 10)
        for place, (token, each) in enumerate(zip(tokens, likely, strict=True)):
            probabilities[0, place] = (1 - each) / 9
            probabilities[0, place, token] = each
        call = chance.CanvasCall({"current_canvas": torch.tensor([tokens])}, None, None, False)  # type: ignore[arg-type]
        return chance.Pass(call, None, (torch.zeros(1, 6), probabilities))  # type: ignore[arg-type]

    far = [0.95, 0.8, 0.2, 0.2, 0.2, 0.8]  # the last one is 5 places away
    canvas = chance.Canvas(
        [said([1, 2, 3, 4, 5, 6], far), said([1, 2, 3, 4, 0, 7], far)],
        torch.tensor([1, 0, 3, 4, 0, 7]),
    )
    first = chance.anchors([canvas])[0]
    assert (first["anchors a pass"], first["near a pass"], first["far a pass"]) == (1, 1, 1)
    assert (first["anchors right"], first["near right"], first["far right"]) == (1, 0, 0.5)
    (row,) = chance.settling([canvas])  # of three passes, the last one said `final`
    assert row["a token stays from"] == pytest.approx((1 + 3 + 1 + 1 + 2 + 2) / 6 / 3)
    assert row["a canvas stays from"] == pytest.approx(1)
    assert row["likeliest unchanged"] == pytest.approx((4 + 5) / 12)
    assert row["canvas unchanged"] == pytest.approx(4 / 6)


def test_blocks_end_at_the_likeliest_border_or_not_at_all() -> None:
    def text_of(token: int) -> str:
        return "ab.\n"[token]

    assert chance._to_border([0, 2, 1, 3, 0], [0.0, -2.0, 0.0, -1.0, 0.0], text_of) == 4
    assert chance._to_border([0, 2, 1, 3, 0], [0.0, -2.0, 0.0, -2.0, 0.0], text_of) == 5
    assert chance._to_border([0, 1], [0.0, 0.0], text_of) == 2
