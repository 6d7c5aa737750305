"""Models that write canvases, compared with transformers' own generation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.errors import ProfileError, RequestError
from moe.kv.cache import KVCache
from moe.loading.memory_plan import GIB
from moe.methods.diffusion.denoise import Acceptance
from moe.methods.diffusion.driver import write
from moe.methods.diffusion.evaluate import driver_of
from moe.sampling.params import Structure
from moe.settings import ModelSettings

SIZES: list[dict[str, Any]] = [
    {"layers": 1, "experts": 8, "top_k": 1, "canvas": 5, "window": 4},
    {"layers": 3, "experts": 16, "top_k": 4, "canvas": 8, "window": 16},
]
STEPS, CANVASES = 4, 2
PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [20, 21, 22, 23, 24, 25, 26, 27]]


def make_model(
    path: Path,
    layers: int,
    experts: int,
    top_k: int,
    canvas: int,
    window: int,
    vocabulary: int = 97,
    attention: str | None = None,
    **more: Any,
) -> Path:
    """A random model; transformers' own initialisation gives logits too flat to tell apart.

    Args:
        attention: which tokens of the encoder see later ones.
        more: of the whole configuration.
    """
    text = {
        **{"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
        **{"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "num_experts": experts},
        **{"top_k_experts": top_k, "moe_intermediate_size": 32, "sliding_window": window},
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        **{"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1},
        "use_bidirectional_attention": attention,
    }
    vision = {
        **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"head_dim": 8, "position_embedding_size": 64},
    }
    more = {"image_token_id": vocabulary - 1, "canvas_length": canvas} | more
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, **more)
    model = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    settings = json.loads((path / "generation_config.json").read_text())
    settings["max_denoising_steps"] = STEPS
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


class Pair:
    """A model here and in transformers."""

    def __init__(self, path: Path, profile: dict[str, Any] | None = None) -> None:
        self.path = path
        self.top_k: int = json.loads((path / "config.json").read_text())["text_config"][
            "top_k_experts"
        ]
        self.reference: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(path).eval()
        self.model = MoE.from_pretrained(path, profile)
        self.num_new = CANVASES * self.reference.config.canvas_length

    def expected(self, prompt: Sequence[int], seed: int, **settings: Any) -> list[int]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": self.num_new, "eos_token_id": -1} | settings
        written: Tensor = self.reference.generate(ids, **settings).sequences
        return written[0, len(prompt) :].tolist()

    def params(self, seed: int, **changes: Any) -> SamplingParams:
        settings = {"max_new_tokens": self.num_new, "ignore_eos": True, "seed": seed}
        return SamplingParams(**settings | changes)


@pytest.fixture(scope="module", params=range(len(SIZES)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(make_model(tmp_path_factory.mktemp("canvases") / "model", **SIZES[request.param]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(make_model(tmp_path_factory.mktemp("small") / "model", **SIZES[0]))


def written(model: MoE, prompts: Any, params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(prompts, params)]


def test_tokens_are_transformers_own_alone_and_in_a_batch(pair: Pair) -> None:
    seeds = range(len(PROMPTS))
    expected = [pair.expected(prompt, seed) for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    params = [pair.params(seed) for seed in seeds]
    assert written(pair.model, PROMPTS, params) == expected
    alone = [written(pair.model, p, s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert alone == expected


def test_temperature_scales_the_schedule_and_0_takes_the_likeliest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = {"t_min": 0.4 * 1.5, "t_max": 0.8 * 1.5}
    assert written(pair.model, PROMPTS[0], pair.params(3, temperature=1.5)) == [
        pair.expected(PROMPTS[0], 3, **hot)
    ]
    got = written(pair.model, PROMPTS[0], pair.params(3, temperature=0))
    take_the_likeliest(monkeypatch)
    assert got == [pair.expected(PROMPTS[0], 3)]


def take_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers do what temperature 0 means."""
    draw = torch.multinomial

    def likeliest(probs: Tensor, num_samples: int) -> Tensor:
        draw(probs, num_samples)  # the canvas goes on with the same random numbers
        return probs.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", likeliest)


@pytest.mark.deep
def test_a_quarter_of_the_experts_in_memory_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(pair.path, tmp_path / "store", whole)
    expected = [pair.expected(prompt, 7) for prompt in PROMPTS]
    limited: dict[str, Any] = {"memory": {"kv_tokens": 200, "reserve_gib": 0.0}}
    limited["prefill"] = {"wave_tokens": 256}  # else it shrinks, and leaves room for experts
    with MoE.from_pretrained(store, limited) as model:
        plan, experts = model.memory_plan, model.stats()["expert_bytes"]
    limited["memory"]["device_gib"] = (plan.needed_bytes - 3 * experts // 4 + 4096) / GIB
    with MoE.from_pretrained(store, limited) as model:
        offload = model.stats()["offload"]
        assert offload is not None
        held, all_experts = model.memory_plan.expert_slots, model.experts.statistics.num_experts
        assert held is not None
        assert held <= sum(all_experts) // 3
        assert written(model, PROMPTS, [pair.params(7)] * len(PROMPTS)) == expected
        layer = model.stats()["layers"][0]
    assert layer["tokens_by"]["decode"] > layer["tokens_by"]["prefill"] > 0
    assert layer["expert_loads_by"]["decode"] > 0


def test_experts_of_few_bits_write_the_same_together_and_from_disk(
    small: Pair, tmp_path: Path
) -> None:
    store = convert(small.path, tmp_path / "store", ModelSettings())
    limited: dict[str, Any] = {"memory.kv_tokens": 200, "memory.reserve_gib": 0.0}
    limited |= {"lossless": False, "model.expert_bits": 3, "prefill.wave_tokens": 256}
    params = [small.params(seed) for seed in range(len(PROMPTS))]
    with MoE.from_pretrained(store, limited) as model:
        plan, experts = model.memory_plan, model.stats()["expert_bytes"]
        together = written(model, PROMPTS, params)
        assert together != written(small.model, PROMPTS, params)
        assert written(model, PROMPTS[1], params[1]) == together[1:2]
    limited["memory.device_gib"] = (plan.needed_bytes - experts // 2 + 4096) / GIB
    with MoE.from_pretrained(store, limited) as model:
        assert written(model, PROMPTS, params) == together
        assert model.stats()["offload"]["bytes_read"] > 0


def test_stops_samples_and_cuts(small: Pair) -> None:
    whole = small.expected(PROMPTS[0], 0)
    stop = whole[3]
    (cut,) = small.model.generate(PROMPTS[0], small.params(0, stop_token_ids=[stop]))
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert cut.finish_reason == "stop"
    short = small.params(0, max_new_tokens=small.num_new - 2, n=2)
    first, second = small.model.generate(PROMPTS[0], short)
    assert first.token_ids == whole[:-2]
    assert first.finish_reason == "length"
    assert second.token_ids != first.token_ids


def test_a_canvas_comes_at_once_and_a_closed_stream_leaves_nothing(small: Pair) -> None:
    stream = small.model.stream([PROMPTS[0]], small.params(0))
    size = small.reference.config.canvas_length
    first = [next(stream).delta.token.id for _ in range(size)]
    assert first == small.expected(PROMPTS[0], 0)[:size]
    stream.close()
    assert written(small.model, PROMPTS[0], small.params(0)) == [small.expected(PROMPTS[0], 0)]


def test_random_numbers_of_others_are_left_alone(small: Pair) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    written(small.model, PROMPTS[0], small.params(0))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 3},
        {"prompt_logprobs": 1},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"structure": Structure("regex", "a+")},
    ],
)
def test_what_canvases_cannot_do_is_refused_by_name(small: Pair, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(changes))} is not possible"):
        small.model.generate(PROMPTS[0], small.params(0, **changes))


def test_logits_and_foreign_settings_are_refused(small: Pair) -> None:
    with pytest.raises(RequestError, match="is not autoregressive"):
        small.model.logits(PROMPTS[0])
    with pytest.raises(ProfileError, match=r"set speculation\.mode: off"):
        MoE.from_pretrained(small.path, {"speculation.mode": "ngram"})
    with pytest.raises(ProfileError, match="lossless: true refuses"):
        MoE.from_pretrained(small.path, {"methods.diffusion.max_steps": 2})


def steps(model: MoE, acceptance: Acceptance) -> Iterator[int]:
    """Passes that refine a canvas, by prompt."""
    driver = driver_of(model)
    for prompt in PROMPTS:
        size = driver.canvas_length
        rows = KVCache(len(prompt) + size)
        lane = driver.lane(prompt, size, 0, acceptance=acceptance, rows=rows)
        write(driver, [lane], model.experts.run)
        lane.result()
        yield lane.passes["decode"]


@torch.inference_mode()
def test_policies_take_fewer_passes(small: Pair) -> None:
    assert list(steps(small.model, Acceptance())) == [STEPS] * len(PROMPTS)
    assert list(steps(small.model, Acceptance(max_steps=2))) == [2] * len(PROMPTS)


@pytest.mark.deep
def test_sharing_experts_over_a_canvas_needs_fewer_of_them(pair: Pair) -> None:
    size, count = pair.reference.config.canvas_length, pair.model.experts.statistics.num_experts[0]

    def denoised(policies: list[str]) -> tuple[float, list[list[int]]]:
        profile = {"lossless": False, "routing.policies": policies}
        model = MoE.from_pretrained(pair.path, profile)
        tokens = written(model, PROMPTS[0], pair.params(0))
        return model.stats()["expert_loads_by"]["decode"], tokens

    whole, tokens = denoised([])
    same, unchanged = denoised([f"des_vote:1:{size}"])
    assert (same, unchanged) == (whole, tokens)
    fewer, _ = denoised([f"des_vote:0.5:{size}"])
    layers, passes = len(pair.model.experts.layers), CANVASES * STEPS
    assert fewer <= layers * passes * max(count // 2, pair.top_k) < whole
