"""Self-contrast against two separate passes, and where it is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE, SamplingParams
from moe.commands.bench import _measured
from moe.commands.evaluate.command import evaluate
from moe.commands.evaluate.scoring import read
from moe.errors import ProfileError
from moe.methods.contrast.readings import Contrast, TwinKV
from moe.network.answer_window import AnswerWindow
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.packed_pass import Work
from moe.settings.profile import load_profile
from routing import Routing
from tests.amounts import deep_except

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "tests/data/heldout_python.txt").read_text()[:3000]
STRENGTH, FLOOR = 0.5, 0.1
CONTRAST = {"strength": STRENGTH, "floor": FLOOR, "rank": 2}
SETTINGS: dict[str, Any] = {"lossless": False, "memory": {"kv_tokens": 1024}}


@pytest.fixture(scope="module")
def plain() -> MoE:
    return MoE.from_pretrained(DEMO, SETTINGS)


@pytest.fixture(scope="module")
def contrasted() -> MoE:
    return MoE.from_pretrained(DEMO, SETTINGS, methods={"contrast": CONTRAST})


@torch.inference_mode()
def weak_logits(model: MoE, ids: list[int], rank: int) -> Tensor:
    """``(T, V)`` of the model with one expert of each row."""

    def run(layer: int, calls: Sequence[ExpertCall]) -> Any:
        changed = []
        for call in calls:
            ids_TK, weights_TK = call.routing.expert_ids, call.routing.weights
            place = weights_TK.sort(dim=1, descending=True, stable=True).indices[:, rank, None]
            total = weights_TK.sum(1, keepdim=True)
            changed.append(replace(call, routing=Routing(ids_TK.gather(1, place), total)))
        return model.experts.run(layer, changed)

    work = [Work(ids, model.backbone.new_cache(len(ids)), all_logits=True)]
    lanes = model.backbone.lanes(work)
    run_lanes(lanes, run)
    return lanes[0].result()[0]


def expected(strong_TV: Tensor, weak_TV: Tensor) -> Tensor:
    scores = (1 + STRENGTH) * strong_TV - STRENGTH * weak_TV
    scores[strong_TV < strong_TV.amax(-1, keepdim=True) + log(FLOOR)] = -torch.inf
    return scores


def test_one_pass_says_what_two_would(plain: MoE, contrasted: MoE) -> None:
    ids = plain.codec.encode("def read_lines(path):\n    with open(path) as file:\n")
    other = ids[3:9]
    found = contrasted.batch_logits([ids, other])
    for tokens, own in zip((ids, other), found, strict=True):
        weak = weak_logits(plain, tokens, rank=2)
        torch.testing.assert_close(own, expected(plain.logits(tokens), weak), atol=2e-4, rtol=1e-4)
    assert not torch.equal(found[0], plain.logits(ids))


@pytest.mark.parametrize("mode", deep_except(["layered"], ["whole", "chunked", "layered"]))
def test_generation_follows_both_views(plain: MoE, contrasted: MoE, mode: str) -> None:
    prompts = [plain.codec.encode(text) for text in ("import os\n", "class A:\n    def f(self")]
    prefill = {"mode": mode, "chunk_tokens": 4, "group_tokens": 4}
    model = contrasted
    if mode != "whole":
        model = MoE.from_pretrained(DEMO, SETTINGS, methods={"contrast": CONTRAST}, prefill=prefill)
    params = SamplingParams(max_new_tokens=12, temperature=0, n=2)
    for completion in model.generate(prompts, params):
        ids = list(completion.prompt_token_ids)
        for token in completion.token_ids:
            scores = expected(plain.logits(ids), weak_logits(plain, ids, rank=2))[-1]
            assert scores[token] >= scores.max() - 1e-3
            ids.append(token)


def test_a_rank_beyond_the_routers_choice(plain: MoE) -> None:
    model = MoE.from_pretrained(DEMO, SETTINGS, methods={"contrast": CONTRAST | {"rank": 6}})
    ids = plain.codec.encode("return None")
    assert not torch.equal(model.logits(ids), plain.logits(ids))


def test_combine_leaves_only_what_is_likely() -> None:
    contrast = Contrast(0.5, 0.1, 2)
    strong, weak = torch.tensor([[2.0, 1.9, -5.0]]), torch.tensor([[2.0, 0.0, -9.0]])
    found = contrast.combine(strong, weak)[0]
    assert found[2] == -torch.inf
    assert found[1] > found[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lossless": True}, "lossless: false"),
        ({"speculation": {"mode": "ngram"}}, "speculation.mode: off"),
        ({"parallel": {"enabled": True}}, "parallel.enabled: false"),
    ],
)
def test_it_is_refused_with_what_it_cannot_go_with(settings: dict[str, Any], key: str) -> None:
    tree = {"lossless": False, "methods.contrast.strength": 0.5} | settings
    with pytest.raises(ProfileError, match=key):
        load_profile(tree)


def test_a_rank_that_no_layer_has_is_refused() -> None:
    with pytest.raises(ProfileError, match="ranks 0 to 31"):
        MoE.from_pretrained(DEMO, SETTINGS, methods={"contrast": CONTRAST | {"rank": 32}})


def test_self_contrast_has_a_price_too() -> None:
    """Tokens that it would not draw keep the chance that they have without it."""
    settings: dict[str, Any] = {"lossless": False, "routing": {"policies": ["top_k:2"]}}
    model = MoE.from_pretrained(DEMO, settings, methods={"contrast": {"strength": 0.5}})
    ids = model.codec.encode(TEXT)[:100]
    reading = read(model, ids)
    assert torch.isfinite(reading.logprobs_TV).all()
    assert reading.experts_LTK.shape[1] == 100
    torch.testing.assert_close(reading.logprobs_TV.exp().sum(-1), torch.ones(100))
    drawn = model.logits(ids).log_softmax(-1)
    likely = drawn.isfinite()
    inside = drawn - (drawn.exp() * likely).sum(-1, keepdim=True).log()
    shift = (reading.logprobs_TV - inside)[likely]
    assert float(shift.max()) <= 1e-4, "scaled to what the likely tokens had together"
    quality = evaluate(model, TEXT, tokens=100)
    assert math.isfinite(quality.bits_per_byte)
    found = [(cost.policy, cost.phase) for cost in quality.policies]
    both = "top_k:2 + self-contrast"
    assert found == [
        ("top_k:2", "prefill"), ("top_k:2", "decode"), ("self-contrast", "decode"),
        (both, "prefill"), (both, "decode"),
    ]  # fmt: skip
    contrast = quality.policies[2]
    assert contrast.kl_bits > 0
    assert contrast.dropped == pytest.approx(-0.25), "one more visit for four"
    assert quality.policies[0].without == contrast.without
    assert model.backbone.reader is not None


def test_self_contrast_stays_without_drafts_as_everywhere() -> None:
    loaded = load_profile(None, {"lossless": False, "methods.contrast.strength": 0.5})
    assert _measured(loaded).profile.speculation.mode == "off"
    assert _measured(load_profile(None)).profile.speculation.mode == "auto"


def test_both_readings_leave_out_the_same() -> None:
    cache = TwinKV(400)
    cache.policy = AnswerWindow(70)
    cache.length = 150
    cache.prompt_read()
    assert (row := cache.seen(220)) is not None
    assert row == cache.weak.seen(220)


def test_it_keeps_keys_and_values_in_buffers() -> None:
    settings: dict[str, Any] = {"lossless": False, "methods.contrast.strength": 0.5}
    settings |= {"memory.kv_policy": "window:512"}
    with pytest.raises(ProfileError, match=r"methods.contrast.strength keeps keys .* of its own"):
        MoE.from_pretrained(DEMO, settings)
