"""Images in prompts of models that write whole blocks, compared with transformers' own generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE
from moe.commands.convert.convert import convert
from moe.images.reader import ImageReader
from moe.settings import ModelSettings
from moe.text.tokenizer import ImagePrompt
from tests.moe.image_models import picture, write_texts
from tests.moe.test_block_diffusion import SIZES, Pair, make_model, written
from tests.moe.test_images import SMALL, Messages, asking, inputs_of

ASKED = [asking(picture(1, 96, 64), picture(2, 50, 90)), asking(picture(3, 64, 64))]
TEXT = [5, 9, 2, 30, 31]


def make(path: Path, attention: str | None) -> Path:
    path.mkdir()
    texts = write_texts("gemma4", path)
    marks = {f"{name}_token_id": getattr(texts, f"{name}_token_id") for name in ("boi", "eoi")}
    marks["image_token_id"] = texts.image_token_id
    return make_model(path, **SIZES[1], vocabulary=128, attention=attention, **marks)


@pytest.fixture(scope="module", params=["vision", None])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("images") / "model", request.param)


@pytest.fixture(scope="module")
def pair(path: Path) -> Pair:
    return Pair(path, SMALL)


def expected(pair: Pair, messages: Messages, seed: int) -> list[int]:
    inputs = inputs_of(pair.model, messages)
    prompt = inputs.pop("input_ids")[0].tolist()
    return pair.expected(prompt, seed, **inputs)


def test_tokens_are_transformers_own_alone_and_in_a_batch(pair: Pair) -> None:
    assert pair.model.status()["images"]["enabled"], pair.model.status()["images"]
    whole = pair.reference.config.text_config.use_bidirectional_attention == "vision"
    prompt = pair.model.codec.encode(ASKED[0])
    assert isinstance(prompt, ImagePrompt)
    assert prompt.rows.whole is whole
    print(len(prompt))
    first, second = (expected(pair, messages, seed) for seed, messages in enumerate(ASKED))
    text = pair.expected(TEXT, 2)
    params = [pair.params(seed) for seed in range(3)]
    assert written(pair.model, [*ASKED, TEXT], params) == [first, second, text]
    assert written(pair.model, ASKED[:1], params[:1]) == [first]
