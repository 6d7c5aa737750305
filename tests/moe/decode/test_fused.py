"""Fused decoding beside transformers' own layers: the same tokens for every proven architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.tiny import tiny_model
from kernels import ExpertWeights, experts_forward
from kernels.cpu import choose_kernel
from moe import MoE, SamplingParams
from moe.kv.cache import KVCache
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from tests.amounts import deep_except
from tests.moe.greedy import likeliest

PROVEN = [
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss",
    "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "sarvam_mla", "sarvam_moe",
]  # fmt: skip
TRACED = [
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v32",
    "dots3_note_text", "gemma4_text", "glm5_next", "glm_moe_dsa", "granitemoehybrid", "hy_v4",
    "inkling2_loop_text", "inkling2_text", "inkling_text", "jamba", "jetmoe", "kimi_linear",
    "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mimo_v2_flash", "minimax",
    "minimax_m3_vl_text", "muse_spark", "nemotron_h", "qwen3_5_moe_text", "qwen3_next",
    "step3p7", "zaya",
]  # fmt: skip
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], [1, 2]]

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def plain_moe(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], MoE]:
    """The tiny model run through transformers' layers."""
    loaded: dict[str, MoE] = {}

    def load(model_type: str) -> MoE:
        if model_type not in loaded:
            path = tiny_checkpoint(model_type)
            loaded[model_type] = MoE.from_pretrained(path, engine={"fused": "off"})
        return loaded[model_type]

    return load


def generated(model: MoE, params: SamplingParams) -> list[list[int]]:
    return [list(completion.token_ids) for completion in model.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "architecture", deep_except(["qwen3_moe", "deepseek_v3", "qwen3_next"], [*PROVEN, *TRACED])
)
def test_greedy_tokens_are_those_of_transformers(
    architecture: str, tiny_moe: Callable[[str], MoE]
) -> None:
    fused = tiny_moe(architecture)
    status = fused.status()["fused"]
    assert status["enabled"], status["why"]
    assert "equal to transformers' forward" in status["why"]
    assert "experts inside" in status["why"]
    assert status["why"].startswith("traced") == (architecture in TRACED)
    # Longer than the sliding windows of the tiny models.
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    said = generated(fused, params)
    assert likeliest(architecture, PROMPTS, said) == said


@pytest.mark.parametrize(
    ("inserted", "why"),
    [
        (lambda x: x + (0.1 if bool((x == x).all()) else 0.0), "reads a number back"),
        (lambda x: torch.fft.fft(x, norm="ortho").real, "is read as"),
        (lambda x: x + x.detach().median(-1, keepdim=True).values, "'median' is no operation"),
        (lambda x: x * (1 + x.sigmoid().cumprod(-1)), "'cumprod' is no operation"),
    ],
)
def test_what_is_not_understood_runs_through_transformers(
    inserted: Callable[[torch.Tensor], torch.Tensor],
    why: str,
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    own = Qwen3MoeDecoderLayer.forward
    monkeypatch.setattr(
        Qwen3MoeDecoderLayer,
        "forward",
        lambda self, hidden, *args, **kwargs: own(self, inserted(hidden), *args, **kwargs),
    )
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"))
    status = model.status()["fused"]
    assert not status["enabled"]
    assert why in status["why"], status
    assert any(status["why"] in notice for notice in model.notices)
    assert len(model.generate([1, 2, 3], SamplingParams(max_new_tokens=2))) == 1


def test_routers_that_find_all_experts_equal_choose_the_first(tmp_path: Path) -> None:
    """As kernels do, also where a router calls another module for its scores."""
    network = tiny_model("afmoe")
    for name, parameter in network.named_parameters():
        if name.endswith("router.gate.weight"):
            torch.nn.init.zeros_(parameter)
    network.save_pretrained(tmp_path)
    fused = MoE.from_pretrained(tmp_path).status()["fused"]
    assert fused["enabled"], fused["why"]


def test_the_profile_turns_it_off(plain_moe: Callable[[str], MoE]) -> None:
    model = plain_moe("mixtral")
    assert model.status()["fused"] == {"enabled": False, "why": "engine.fused is off"}
    assert not any("decode steps" in notice for notice in model.notices)


def test_other_dtypes_are_left_to_transformers(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("mixtral"), model={"dtype": "bfloat16"})
    assert "bfloat16" in model.status()["fused"]["why"]


@pytest.mark.parametrize("mode", ["whole", "chunked", "layered"])
def test_forks_waves_and_preemption_change_nothing(
    mode: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, n=2, ignore_eos=True)
    texts = []
    for fused in ("off", "auto"):
        model = MoE.from_pretrained(
            tiny_checkpoint("qwen3_moe"),
            engine={"fused": fused, "max_batch_size": 4},
            prefill={"mode": mode, "chunk_tokens": 4, "group_tokens": 4},
            memory={"kv_tokens": 60},
        )
        texts.append(generated(model, params))
    assert texts[0] == texts[1]


def test_a_huge_prompt_in_a_step_takes_no_memory_from_decoding(
    tiny_moe: Callable[[str], MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scratch memory is given back; a call that needs none of its own must not miss it."""
    model = tiny_moe("qwen3_moe")
    assert model.status()["fused"]["enabled"]
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    expected = generated(model, params)
    own = model.experts.layers[0]
    assert isinstance(own, ExpertWeights)
    huge = ExpertWeights(torch.zeros(8, 3072, 64), torch.zeros(8, 64, 1536), own.activation)
    ids = torch.arange(8).expand(4096, 8).contiguous()
    forward = model.experts.forward

    def beside_a_prompt(*arguments: Any) -> torch.Tensor:
        rows = forward(*arguments)
        if arguments[3] is own:  # in one layer of each step
            experts_forward(torch.zeros(4096, 64), ids, torch.ones(4096, 8), huge)
        return rows

    monkeypatch.setattr(model.experts, "forward", beside_a_prompt)
    assert generated(model, params) == expected


def test_statistics_count_the_same(
    tiny_moe: Callable[[str], MoE], plain_moe: Callable[[str], MoE]
) -> None:
    layers = []
    for model in (tiny_moe("olmoe"), plain_moe("olmoe")):
        model.reset_stats()
        generated(model, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
        layers.append(model.stats()["layers"])
    assert layers[0] == layers[1]


@pytest.mark.parametrize(
    "kind", deep_except(["qwen2_moe"], ["qwen2_moe", "qwen3_next", "deepseek_v32", "inkling2_text"])
)
def test_a_quantized_trunk_is_fused_too(kind: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(
        tiny_checkpoint(kind), model={"expert_bits": 8, "trunk_bits": 8, "group_size": 32}
    )
    assert model.status()["fused"]["enabled"], model.status()["fused"]["why"]
    assert len(model.generate([1, 2, 3], SamplingParams(max_new_tokens=3))) == 1


@settings(max_examples=25)
@given(st.data())
@torch.inference_mode()
def test_any_order_of_reading_gives_the_same_logits(
    tiny_moe: Callable[[str], MoE], data: st.DataObject
) -> None:
    architecture = data.draw(st.sampled_from(["mixtral", "gpt_oss", "deepseek_v3", "phimoe"]))
    model = tiny_moe(architecture)
    backbone, run = model.backbone, model.experts.run
    tokens = st.integers(3, 120)
    sequences: list[tuple[list[int], KVCache]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        step = []
        if data.draw(st.booleans()) or not sequences:
            cache = backbone.new_cache(200)
            assert isinstance(cache, KVCache)
            sequences.append(([], cache))
            step.append((len(sequences) - 1, data.draw(st.lists(tokens, min_size=1, max_size=20))))
        elif data.draw(st.booleans()):
            ids, cache = sequences[data.draw(st.integers(0, len(sequences) - 1))]
            length = data.draw(st.integers(1, cache.length))
            sequences.append((ids[:length], cache.fork(200, length)))
        chosen = data.draw(st.sets(st.sampled_from(range(len(sequences)))))
        step += [
            (index, data.draw(st.lists(tokens, min_size=1, max_size=4)))
            for index in chosen
            if index not in [i for i, _ in step]
        ]
        if not step:
            continue
        lanes = backbone.lanes([Work(new, sequences[index][1]) for index, new in step], "decode")
        run_lanes(lanes, run)
        logits = [rows for lane in lanes for rows in lane.result()]
        for (index, new), rows in zip(step, logits, strict=True):
            ids = sequences[index][0] + new
            sequences[index] = ids, sequences[index][1]
            torch.testing.assert_close(rows[-1], _whole(model, ids), rtol=1e-4, atol=1e-4)


def _whole(model: MoE, ids: list[int]) -> torch.Tensor:
    """Logits of the last token when transformers reads all of them at once."""
    backbone = model.backbone
    (lane,) = backbone.lanes([Work(ids, backbone.new_cache(len(ids)))])
    run_lanes([lane], model.experts.run)
    return lane.result()[0][-1]
