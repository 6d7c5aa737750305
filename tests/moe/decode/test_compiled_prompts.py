"""Prompts by compiled layers: the same bits however they are cut, and close to transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.models.tiny import tiny_model
from kernels.cpu import choose_kernel
from moe import MoE, SamplingParams
from moe.decode import enable, traced
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from tests.amounts import deep_except

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

PROMPT = [(7 * i * i) % 90 + 3 for i in range(150)]
PLANES: dict[str, Any] = {"model.trunk_bits": 8, "model.group_size": 32, "lossless": False}
FLOATS: dict[str, Any] = {"model.trunk_bits": None, "model.expert_bits": 16}


def loaded(folder: Path, kind: str, settings: dict[str, Any] | None = None) -> MoE:
    if not (folder / "config.json").exists():
        tiny_model(kind).save_pretrained(folder)
    return MoE.from_pretrained(folder, PLANES | (settings or {}))


@torch.inference_mode()
def logits_of(model: MoE, *prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """All logits of prompts, each read in these pieces, one piece of each prompt at a time."""
    caches = [model.backbone.new_cache(sum(map(len, pieces))) for pieces in prompts]
    found: list[list[Tensor]] = [[] for _ in prompts]
    for pieces in zip(*prompts, strict=True):
        work = [Work(ids, cache, True) for ids, cache in zip(pieces, caches, strict=True)]
        lanes = model.backbone.lanes(work)
        run_lanes(lanes, model.experts.run)
        for own, rows in zip(found, lanes[0].result(), strict=True):
            own.append(rows)
    return [torch.cat(own) for own in found]


@pytest.mark.parametrize(
    ("kind", "kv_bits", "settings", "limits"),
    [
        # Where a last bit tips an activation's 8-bit code, or a choice of experts, more differs.
        ("qwen3_moe", 16, PLANES, (0.9, 0.05)),
        pytest.param("gpt_oss", 32, PLANES, (0.9, 0.05), marks=pytest.mark.deep),
        ("gpt_oss", 8, PLANES, (0.9, 0.05)),
        pytest.param("ernie4_5_moe", 4, PLANES, (0.9, 0.05), marks=pytest.mark.deep),
        pytest.param("glm4_moe", 16, PLANES, (0.9, 0.05), marks=pytest.mark.deep),
        pytest.param("qwen3_moe", 32, FLOATS, (1, 1e-4), marks=pytest.mark.deep),
        # Latent attention. transformers' keys are float32 once they are expanded, ours bf16.
        ("deepseek_v3", 32, FLOATS, (1, 1e-4)),
        pytest.param("deepseek_v3", 32, PLANES, (0.9, 0.05), marks=pytest.mark.deep),
        ("glm4_moe_lite", 16, PLANES | {"model.trunk_bits": 4}, None),
        pytest.param("deepseek_v2", 8, FLOATS, (0.5, 0.15), marks=pytest.mark.deep),
        pytest.param("glm4_moe_lite", 4, FLOATS, (0.5, 0.15), marks=pytest.mark.deep),
        # Programs: recurrent layers of each kind, chunks, sparse attention, windows.
        ("qwen3_next", 32, FLOATS, (1, 2e-4)),
        ("deepseek_v32", 32, FLOATS, (0.9, 1e-4)),
        ("qwen4_exp_text", 32, FLOATS, (1, 1e-4)),  # ids of tokens before the first
        pytest.param("qwen3_next", 8, PLANES, (0.5, 0.15), marks=pytest.mark.deep),
        pytest.param("deepseek_v32", 16, PLANES, None, marks=pytest.mark.deep),
        pytest.param("kimi_linear", 32, FLOATS, (1, 2e-4), marks=pytest.mark.deep),
        pytest.param("minimax", 32, FLOATS, (1, 2e-4), marks=pytest.mark.deep),
        pytest.param("llama4_text", 32, FLOATS, (1, 2e-4), marks=pytest.mark.deep),
        pytest.param("gemma4_text", 32, FLOATS, (0.9, 5e-4), marks=pytest.mark.deep),
        pytest.param("nemotron_h", 16, PLANES, None, marks=pytest.mark.deep),
    ],
)
def test_how_prompts_are_cut_and_what_is_beside_them_changes_no_bit(
    kind: str,
    kv_bits: int,
    settings: dict[str, Any],
    limits: tuple[float, float] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enable, "linears_are_faster", lambda _: True)
    model = loaded(tmp_path, kind, settings | {"memory.kv_bits": kv_bits})
    assert model.backbone.prompt_forward is not None, model.status()["fused"]["why"]
    other = PROMPT[::-1]
    (whole,) = logits_of(model, [PROMPT])
    (cut,) = logits_of(model, [PROMPT[:1], PROMPT[1:70], PROMPT[70:71], PROMPT[71:]])
    beside, _ = logits_of(model, [PROMPT[:90], PROMPT[90:]], [other[:3], other[3:80]])
    assert torch.equal(cut, whole)
    assert torch.equal(beside, whole)
    monkeypatch.setattr(traced, "_CHUNK_ROWS", (16, 16))  # rows that go through a segment together
    (in_chunks,) = logits_of(model, [PROMPT])
    assert torch.equal(in_chunks, whole)
    if limits is not None:
        model.backbone.prompt_forward = None
        (theirs,) = logits_of(model, [PROMPT])
        share, limit = limits
        assert (whole - theirs).abs().amax(1).quantile(share) < limit


@pytest.mark.parametrize("kind", deep_except(["llama4_text"], ["qwen3_next", "llama4_text"]))
@torch.inference_mode()
def test_the_last_rows_logits_are_those_of_all_rows(kind: str, tmp_path: Path) -> None:
    """Of prompts in one pass; some programs make logits before other things."""
    model = loaded(tmp_path, kind)
    prompts = [PROMPT, PROMPT[:20], PROMPT[3:90]]
    found = []
    for every in (False, True):
        work = [Work(ids, model.backbone.new_cache(len(ids)), every) for ids in prompts]
        lanes = model.backbone.lanes(work)
        run_lanes(lanes, model.experts.run)
        found.append([rows[-1] for rows in lanes[0].result()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill.mode": "layered", "prefill.group_tokens": 16},
        {"prefill.mode": "chunked", "prefill.chunk_tokens": 16},
        {"memory.prefix_tokens": 0},
    ],
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_ways_to_read_prompts_give_the_same_answers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True, logprobs=1)
    prompts = [PROMPT, PROMPT[:100] + PROMPT[:20], PROMPT[:100]]
    answers = [
        [
            (token.id, token.logprob)
            for p in prompts
            for token in model.generate([p], params)[0].tokens
        ]
        for model in (loaded(tmp_path, kind), loaded(tmp_path, kind, settings))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "kind", deep_except(["deepseek_v3", "qwen3_next"], ["qwen3_moe", "deepseek_v3", "qwen3_next"])
)
def test_where_torch_multiplies_floats_faster_transformers_layers_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enable, "linears_are_faster", lambda _: False)
    monkeypatch.setattr(enable, "FEW_FLOATS", 0)
    model = loaded(tmp_path, kind, {"model.trunk_bits": None})
    assert model.backbone.prompt_forward is None
    assert "matrices of floats" in model.status()["fused"]["why"]
