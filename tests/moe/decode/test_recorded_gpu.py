"""Recorded decode steps on a real GPU: TRITON_INTERPRET=0 python -m pytest -m gpu tests/moe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models.tiny import tiny_model
from kernels.triton.language import INTERPRETED
from moe import MoE, SamplingParams
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.speculate.draft import Stop
from moe.speculate.elastic import ElasticDrafts
from moe.speculate.passes import PendingDraft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and TRITON_INTERPRET=0"
    ),
]
ARCHITECTURES = ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe", "deepseek_v3"]
PARAMS = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], [1, 2]]


def load(path: Path, architecture: str, dtype: str, fused: str = "auto") -> MoE:
    tiny_model(architecture).save_pretrained(path)
    return MoE.from_pretrained(
        path, device="cuda", model={"dtype": dtype}, engine={"fused": fused, "max_batch_size": 2}
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_and_statistics_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    found = []
    for fused in ("auto", "off"):
        model = load(tmp_path, architecture, "float32", fused)
        if fused == "auto":
            assert model.status()["fused"]["why"].endswith("; experts inside")
        tokens = [completion.token_ids for completion in model.generate(PROMPTS, PARAMS)]
        assert model.status()["fused"]["enabled"] == (fused == "auto")
        found.append((tokens, model.stats()["layers"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_run_beside_those_of_the_host(architecture: str, tmp_path: Path) -> None:
    found = []
    for fused in ("auto", "off"):
        model = load(tmp_path, architecture, "float32", fused)
        forward = model.experts.forward
        model.experts.forward = lambda *given, run=forward: run(*given)  # one that needs Python
        found.append([completion.token_ids for completion in model.generate(PROMPTS, PARAMS)])
        assert model.status()["fused"]["enabled"] == (fused == "auto")
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_is_recorded_too(architecture: str, dtype: str, tmp_path: Path) -> None:
    model = load(tmp_path, architecture, dtype)
    assert model.status()["fused"]["enabled"], model.status()["fused"]["why"]
    assert len(model.generate(PROMPTS, PARAMS)) == len(PROMPTS)


@torch.inference_mode()
def test_a_recorded_step_never_waits_for_the_device(tmp_path: Path) -> None:
    model = load(tmp_path, "mixtral", "bfloat16")
    backbone, run = model.backbone, model.experts.run
    cache = backbone.new_cache(40)
    run_lanes(backbone.lanes([Work([1, 2, 3], cache)]), run)
    run_lanes(backbone.lanes([Work([4], cache)], "decode"), run)  # records
    torch.cuda.set_sync_debug_mode("error")
    try:
        for token in range(5, 25):
            run_lanes(backbone.lanes([Work([token], cache)], "decode"), run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_draft_stays_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits until its tokens are read; greedy ones and those of a seed are as without."""
    ways: list[dict[str, Any]] = [{"seed": 1}, {"top_k": 4}, {}]
    drawn = [replace(PARAMS, temperature=1.0, **way) for way in ways]
    plain = load(tmp_path, "mixtral", "float32")
    expected = [
        [completion.token_ids for completion in plain.generate(PROMPTS[:2], params)]
        for params in (PARAMS, drawn[0])
    ]
    speculation = {"mode": "elastic", "experts": 1, "max_depth": 3}
    model = MoE.from_pretrained(
        tmp_path, device="cuda", model={"dtype": "float32"}, speculation=speculation
    )
    speculator = model._loaded.speculation.speculator
    assert speculator is not None
    elastic = speculator._passes["elastic"]
    assert isinstance(elastic, ElasticDrafts)
    for params in (PARAMS, *drawn):
        model.generate(PROMPTS[:2], params)  # records, and tries kernels
    chain, read, tokens = elastic._chain, elastic._read, list[int]()

    def watched(drafts: Sequence[PendingDraft], stop: Stop) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            chain(drafts, stop)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tokens.extend(len(draft.tokens) for draft in drafts if draft.depth)

    def waits(numbers: Sequence[torch.Tensor]) -> list[list[tuple[float, float]]]:
        torch.cuda.set_sync_debug_mode("default")
        return read(numbers)

    monkeypatch.setattr(elastic, "_chain", watched)
    monkeypatch.setattr(elastic, "_read", waits)
    found = [
        [completion.token_ids for completion in model.generate(PROMPTS[:2], params)]
        for params in (PARAMS, *drawn)
    ]
    assert found[:2] == expected
    assert tokens
    assert all(tokens)  # an error ends a draft in silence
    assert elastic._recorded is not None
