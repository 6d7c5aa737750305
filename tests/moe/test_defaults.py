"""What a request gets where it does not say: request, profile, model, neutral, in this order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import MoE, SamplingParams
from moe.errors import RequestError
from moe.kv.cache import KVCache
from moe.requests import CONTINUATION, Defaults
from moe.settings import GenerationSettings
from moe.text.generation_config import GENERATION_CONFIG, ModelSampling

OWN = ModelSampling({"temperature": 0.6, "top_k": 20, "min_p": 0.05})


def defaults(own: ModelSampling = OWN, **settings: Any) -> Defaults:
    return Defaults(GenerationSettings(**settings), own)


def test_the_model_is_asked_where_the_profile_does_not_say() -> None:
    params = defaults(top_k=5).params(chat=True, room=10)
    assert (params.temperature, params.top_k, params.min_p, params.top_p) == (0.6, 5, 0.05, 1.0)
    assert defaults(top_k=5).origins == {
        "temperature": {"value": 0.6, "origin": GENERATION_CONFIG},
        "top_p": {"value": 1.0, "origin": "default"},
        "top_k": {"value": 5, "origin": "profile"},
        "min_p": {"value": 0.05, "origin": GENERATION_CONFIG},
        "repetition_penalty": {"value": 1.0, "origin": "default"},
    }


def test_the_model_may_be_left_out() -> None:
    params = defaults(config="off").params(chat=True, room=10)
    assert params == SamplingParams(temperature=0, max_new_tokens=10)


def test_a_request_has_the_last_word() -> None:
    params = defaults(seed=4).params(chat=True, room=10, temperature=0.0, min_p=0.0, seed=None)
    assert (params.temperature, params.min_p, params.top_k, params.seed) == (0.0, 0.0, 20, 4)
    with pytest.raises(RequestError, match="top_p must be"):
        defaults().params(chat=True, room=10, top_p=7.0)


@pytest.mark.parametrize(
    ("setting", "chat", "text"),
    [("auto", 900, CONTINUATION), (None, 900, 900), (50, 50, 50), (5000, 900, 900)],
)
def test_how_long_an_answer_may_be(setting: Any, chat: int, text: int) -> None:
    made = defaults(max_new_tokens=setting)
    assert made.params(chat=True, room=900).max_new_tokens == chat
    assert made.params(chat=False, room=900).max_new_tokens == text
    assert made.params(chat=False, room=900, max_new_tokens=2000).max_new_tokens == 2000


@pytest.fixture
def model(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> MoE:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), path)
    (path / GENERATION_CONFIG).write_text('{"do_sample": true, "temperature": 0.9, "top_p": 7}')
    return MoE.from_pretrained(path, memory={"kv_tokens": 60}, generation={"seed": 3})


def test_a_models_own_sampling_is_used_and_shown(model: MoE) -> None:
    assert any("top_p must be" in notice for notice in model.notices)
    assert model.status()["sampling"]["temperature"] == {"value": 0.9, "origin": GENERATION_CONFIG}
    said = model.generate([1, 2, 3])[0]
    explicit = SamplingParams(temperature=0.9, seed=3, max_new_tokens=57)
    assert said == model.generate([1, 2, 3], explicit)[0]
    assert said != model.generate([1, 2, 3], SamplingParams(temperature=0, max_new_tokens=57))[0]


def test_a_request_without_a_limit_goes_on_until_memory_is_full(model: MoE) -> None:
    params = SamplingParams(max_new_tokens=None, temperature=0, ignore_eos=True)
    done = model.generate([[1, 2, 3], [4] * 50, [5]], params)
    assert [len(one.tokens) for one in done] == [57, 10, 59]
    assert {one.finish_reason for one in done} == {"length"}


def test_keys_and_values_take_no_room_before_they_come() -> None:
    cache = KVCache(1_000_000_000)  # of such rows 16 TB
    rows = torch.randn(1, 2, 3000, 4)
    cache.write(0, rows[:, :, :5], rows[:, :, :5])
    cache.length = 5
    assert cache.room < 2000
    before = cache.addresses([0])
    cache.reserve(6)
    assert (cache.addresses([0]) == before).all()
    cache.write(0, rows[:, :, 5:], -rows[:, :, 5:])
    cache.length = 3000
    keys, values = cache.read(0, 3000)
    assert torch.equal(keys, rows)
    assert torch.equal(values[:, :, 5:], -rows[:, :, 5:])
    assert cache.room < 6000
    with pytest.raises(AssertionError, match="3001 tokens in buffers of 3000"):
        cache.fork(3000, 3000).reserve(3001)


def test_layers_that_a_cancelled_pass_did_not_reach_grow_later() -> None:
    cache = KVCache(10_000)
    rows = torch.randn(1, 2, 4000, 4)
    for layer in range(2):
        cache.write(layer, rows[:, :, :5], rows[:, :, :5])
    cache.length = 5
    cache.write(0, rows[:, :, :4000], rows[:, :, :4000])  # cancelled before layer 1
    cache.addresses([0, 1])
    for layer in range(2):
        keys, _ = cache.read(layer, cache.room)
        assert keys.shape[2] == cache.room
        assert torch.equal(keys[:, :, :5], rows[:, :, :5])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("drafts", ["off", "ngram"])
def test_answers_are_the_same_when_buffers_grow_at_every_step(
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    drafts: str,
) -> None:
    """In transformers' passes, in compiled steps, and in those that verify drafts."""
    prompts = [[1, 2, 3, 1, 2, 3, 1], [4] * 40, [5, 6]]
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True, n=2)

    def answers() -> list[list[int]]:
        settings: Any = {"speculation": {"mode": drafts}}
        model = MoE.from_pretrained(tiny_checkpoint(architecture), **settings)
        return [one.token_ids for one in model.generate(prompts, params)]

    usual = answers()
    grown: list[int] = []
    reserve = KVCache.reserve

    def watched(cache: KVCache, end: int) -> None:
        before = cache.room
        reserve(cache, end)
        grown.extend([cache.room] * (0 < before < cache.room))

    monkeypatch.setattr("moe.kv.cache._AHEAD", 1)
    monkeypatch.setattr(KVCache, "reserve", watched)
    assert answers() == usual
    assert len(grown) > 20
